"""Row lookup, concatenation, sums and scaling in C, for narrow windows."""

import torch
from torch import Tensor

from specdec.kernels.gather import cpu
from specdec.kernels.native.call import TOKENS, function, pointer, serves, strided


def embedding(table_VD: Tensor, id_T: Tensor) -> Tensor:
    if len(id_T) > TOKENS or not table_VD.is_cpu or table_VD.stride(1) != 1 or not id_T.is_contiguous():
        return cpu.embedding(table_VD, id_T)
    out_TD = table_VD.new_empty((len(id_T), table_VD.shape[1]))
    size, (at, by_row) = table_VD.element_size(), strided(table_VD, 1)
    row = out_TD.shape[1] * size
    function("gather")(*(at, by_row * size, pointer(id_T)), *(len(id_T), row, pointer(out_TD), row))
    return out_TD


def concat(*parts_TD: Tensor) -> Tensor:
    is_uniform = all(part.stride(1) == 1 and part.dtype == parts_TD[0].dtype for part in parts_TD)
    if not is_uniform or len(parts_TD[0]) > TOKENS or not parts_TD[0].is_cpu:
        return cpu.concat(*parts_TD)
    assert all(len(part) == len(parts_TD[0]) for part in parts_TD)
    widths, size = [part.shape[1] for part in parts_TD], parts_TD[0].element_size()
    out_TD = parts_TD[0].new_empty((len(parts_TD[0]), sum(widths)))
    to, by_to = out_TD.data_ptr(), sum(widths) * size
    for part, width in zip(parts_TD, widths, strict=True):
        at, by_row = strided(part, 1)
        function("gather")(*(at, by_row * size, None, len(part), width * size), *(to, by_to))
        to += width * size
    return out_TD


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    dense = x_TD.is_contiguous() and y_TD.is_contiguous()
    if not serves(x_TD) or not dense or x_TD.dtype != y_TD.dtype or x_TD.shape != y_TD.shape:
        return cpu.add(x_TD, y_TD)
    out_TD = torch.empty_like(x_TD)
    function("add", x_TD.dtype)(pointer(x_TD), pointer(y_TD), x_TD.numel(), pointer(out_TD))
    return out_TD


def scale(x_TD: Tensor, by: float) -> Tensor:
    if not serves(x_TD) or not x_TD.is_contiguous():
        return cpu.scale(x_TD, by)
    out_TD = torch.empty_like(x_TD)
    function("scale", x_TD.dtype)(pointer(x_TD), x_TD.numel(), by, pointer(out_TD))
    return out_TD


def scatter_columns(x_TC: Tensor, ids_C: Tensor, width: int) -> Tensor:
    if not serves(x_TC) or not x_TC.is_contiguous() or not ids_C.is_contiguous():
        return cpu.scatter_columns(x_TC, ids_C, width)
    assert ids_C.dtype == torch.int64 and len(ids_C) == x_TC.shape[1]
    out_TV = x_TC.new_empty((len(x_TC), width))
    function("scatter_columns", x_TC.dtype)(
        *(pointer(x_TC), *x_TC.shape, pointer(ids_C), width, pointer(out_TV))
    )
    return out_TV
