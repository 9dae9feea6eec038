"""Rows by number and rows side by side, one after the other."""

import torch
from torch import Tensor


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    """Return the rows of a table that ids name."""
    return torch.stack([table_VD[i] for i in id_T.tolist()])


def concat(*parts_TD: Tensor) -> Tensor:
    """Return each token's rows side by side, in fresh memory; of one tensor a copy."""
    return torch.stack([torch.cat(rows) for rows in zip(*parts_TD, strict=True)])


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """Return the sum in fresh memory."""
    return x_TD + y_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    """Return the product in fresh memory."""
    return x_TD * by


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    """Return rows so wide with x in the columns that ids name, and minus infinity elsewhere."""
    wide_TV = x_TC.new_full((len(x_TC), width), -torch.inf)
    for column, i in enumerate(ids_C.tolist()):
        wide_TV[:, i] = x_TC[:, column]
    return wide_TV
