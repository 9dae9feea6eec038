"""Row lookup, concatenation, sums and scaling in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    """Return the table's rows with the given ids."""
    return F.embedding(id_T, table_VD)


def concat(*parts_TD: Tensor) -> Tensor:
    """Return each token's rows concatenated, in new memory; a single tensor is copied."""
    return torch.cat(parts_TD, dim=-1)


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Return the sum in new memory."""
    return x_TD + y_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    """Return the product in new memory."""
    return x_TD * by


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    """Return rows of `width` with x in the columns `ids_C` and minus infinity elsewhere."""
    return x_TC.new_full((len(x_TC), width), -torch.inf).index_copy_(1, ids_C, x_TC)
