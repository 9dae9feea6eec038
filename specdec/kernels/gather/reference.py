"""Row lookup, concatenation, sums and scaling, one row at a time."""

import torch
from torch import Tensor


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    """Return the table's rows with the given ids."""
    return torch.stack([table_VD[i] for i in id_T.tolist()])


def concat(*parts_TD: Tensor) -> Tensor:
    """Return each token's rows concatenated, in new memory; a single tensor is copied."""
    return torch.stack([torch.cat(rows) for rows in zip(*parts_TD, strict=True)])


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Return the sum in new memory."""
    return x_TD + y_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    """Return the product in new memory."""
    return x_TD * by


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    """Return rows of `width` with x in the columns `ids_C` and minus infinity elsewhere."""
    out_TV = x_TC.new_full((len(x_TC), width), -torch.inf)
    for column, i in enumerate(ids_C.tolist()):
        out_TV[:, i] = x_TC[:, column]
    return out_TV
