"""Row lookup, concatenation, sums and scaling in torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    return F.embedding(id_T, table_VD)


def concat(*parts_TD: Tensor) -> Tensor:
    return torch.cat(parts_TD, dim=-1)


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    return x_TD + y_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    return x_TD * by


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    return x_TC.new_full((len(x_TC), width), -torch.inf).index_copy_(1, ids_C, x_TC)
