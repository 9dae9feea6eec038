"""Rows by number and rows side by side, in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    """Return the rows of a table that ids name."""
    return F.embedding(id_T, table_VD)


def concat(*parts_TD: Tensor) -> Tensor:
    """Return each token's rows side by side, in fresh memory; of one tensor a copy."""
    return torch.cat(parts_TD, dim=-1)


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Return the sum in fresh memory."""
    return x_TD + y_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    """Return the product in fresh memory."""
    return x_TD * by


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    """Return rows so wide with x in the columns that ids name, and minus infinity elsewhere."""
    return x_TC.new_full((len(x_TC), width), -torch.inf).index_copy_(1, ids_C, x_TC)
