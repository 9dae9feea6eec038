"""y = x Wᵀ + b in C, in float32 and bfloat16, and with integers of 8, 6 and 4 bits.

A small matrix product costs mostly call overhead, which is low here. A row's result does not depend on its
window, as it does in oneDNN's kernels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.linear import cpu
from specdec.kernels.linear.integers import GROUP, HALF, Integers, sixteen_bits
from specdec.kernels.linear.matrix import Matrix, join, widen
from specdec.kernels.native.call import function, pointer, strided
from specdec.kernels.native.instruction_sets import c_kernels
from specdec.kernels.native.signatures import SUFFIX
from specdec.kernels.native.threads import with_helpers

PANEL = 16
BY_OUTPUT, SCALES, ZEROS, ZEROS_BFLOAT16, OFFSETS, HALVES = range(6)
"""What is stored per output or group of integers, as in integer.inc."""
KINDS = {
    4: (SCALES, ZEROS, ZEROS_BFLOAT16, OFFSETS, HALVES),
    6: (SCALES, ZEROS_BFLOAT16, OFFSETS, HALVES),
    8: (BY_OUTPUT, SCALES, ZEROS, ZEROS_BFLOAT16, HALVES),
}
"""Supported kinds by bits."""
RAISED = {8: 128, 6: 32, 4: 8}
"""Bias, by bits, that makes the stored integers unsigned."""


class Panels(NamedTuple):
    weight: Tensor
    """[N / 16, K, 16], or in bfloat16 [N / 16, K / 2, 16, 2], padded with zero outputs; with a leading head
    dimension for `pack_heads`."""
    bias_N: Tensor | None
    outputs: int

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype


class WholePanels(NamedTuple):
    """Integer weights in integer.inc's layout."""

    weight: Tensor
    scale: Tensor
    bias_N: Tensor | None
    outputs: int
    bits: int
    kind: int
    """integer.inc's kind: what is stored per group besides the integers."""
    dtype: torch.dtype


class MixedFormatLinear(NamedTuple):
    """Concatenated parts in different formats."""

    parts: tuple[Panels | WholePanels, ...]
    outputs: int
    dtype: torch.dtype


def _serves(weight: Matrix) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in SUFFIX:
        return False
    return isinstance(weight, Integers) or weight.shape[1] % 2 == 0


def pack(
    weight: Matrix | list[Matrix], bias_N: Tensor | None = None
) -> Panels | WholePanels | MixedFormatLinear | cpu.CpuPackedLinear:
    """Pack a weight into panels, or for `cpu` if the C kernels do not support it."""
    weights = weight if isinstance(weight, list) else [weight]
    parts = join([matrix if isinstance(matrix, Integers) else widen(matrix) for matrix in weights])
    if c_kernels() is None or not all(_serves(part) for part in parts):
        return cpu.pack([widen(part) for part in parts], bias_N)
    packed = tuple(_lay_all(parts, bias_N))
    return (
        packed[0]
        if len(packed) == 1
        else MixedFormatLinear(packed, sum(matrix.outputs for matrix in packed), parts[0].dtype)
    )


def _lay_all(parts: list[Matrix], bias_N: Tensor | None) -> Iterator[Panels | WholePanels]:
    first = 0
    for part in parts:
        part_bias_N = None if bias_N is None else bias_N[first : first + part.shape[0]]
        first += part.shape[0]
        if isinstance(part, Integers):
            yield lay_whole(part, part_bias_N)
        else:
            yield _lay(widen(part), part_bias_N)


def _lay(weight_ND: Tensor, bias_N: Tensor | None) -> Panels:
    outputs, inputs = weight_ND.shape
    panels, pair = -(-outputs // PANEL), 4 // weight_ND.itemsize
    filled = weight_ND.new_zeros(panels * PANEL, inputs)
    filled[:outputs] = weight_ND
    packed = filled.view(panels, PANEL, inputs // pair, pair).transpose(1, 2).contiguous()
    return Panels(packed, bias_N, outputs)


def lay_whole(matrix: Integers, bias_N: Tensor | None = None) -> WholePanels:
    """Interleave four inputs each of 16 outputs; below 8 bits two of a group share the same bytes."""
    (outputs, inputs), bits = matrix.shape, matrix.bits
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    number_ND = matrix.number_ND.contiguous()
    weight = torch.empty((panels, groups, bits, 4 * PANEL), dtype=torch.uint8)
    scale_NG, other_NG, kind = _lay_scales(matrix)
    assert kind in KINDS[bits], f"{bits} bits have no form of kind {kind}"
    step = 2 if kind == HALVES else 1
    columns = 0 if kind == BY_OUTPUT else scale_NG.shape[1] // step
    scale = scale_NG.new_empty((panels, columns, 1 if kind == SCALES else 2, PANEL))
    (first,) = strided(scale_NG, scale_NG.dim())
    second = first + scale_NG.itemsize if kind == HALVES else pointer(other_NG)
    with with_helpers():
        function("lay_integers")(
            *(pointer(number_ND), outputs, inputs, bits, pointer(weight)),
            *(first, second, columns, columns * step, step, pointer(scale)),
        )
    scale = scale_NG if kind == BY_OUTPUT else scale
    return WholePanels(weight, scale, bias_N, outputs, bits, kind, matrix.dtype)


def _lay_scales(matrix: Integers) -> tuple[Tensor, Tensor | None, int]:
    """Return scales, padded to whole panels or pairs, other per-group values, and their kind."""
    if not matrix.by_group:
        return pad(matrix.scale, (0, -len(matrix.scale) % PANEL)), None, BY_OUTPUT
    is_pair = matrix.group == HALF or matrix.offset_NG is not None
    exact_NG = None if is_pair else sixteen_bits(matrix.scale)
    scale_NG = (matrix.scale.half() if exact_NG is None else exact_NG).contiguous()
    if matrix.group == HALF:
        return pad(scale_NG, (0, scale_NG.shape[1] % 2)), None, HALVES
    if matrix.offset_NG is not None:
        return scale_NG, matrix.offset_NG.half().contiguous(), OFFSETS
    if matrix.zero_NG is None and scale_NG.dtype == torch.float16:
        return scale_NG, None, SCALES
    zero_NG = torch.zeros_like(scale_NG) if matrix.zero_NG is None else matrix.zero_NG.contiguous()
    kind = ZEROS if scale_NG.dtype == torch.float16 else ZEROS_BFLOAT16
    return scale_NG, (zero_NG / RAISED[matrix.bits]).to(scale_NG.dtype), kind


def pack_heads(weight_HNK: Tensor) -> Panels | Tensor:
    """Pack each head's weight into panels, or for `cpu` if the C kernels do not support it."""
    if c_kernels() is None or not _serves(weight_HNK[0]):
        return cpu.pack_heads(weight_HNK)
    packed = torch.stack([_lay(head_NK, None).weight for head_NK in weight_HNK])
    return Panels(packed, None, weight_HNK.shape[1])


def linear(x_TD: Tensor, packed: Panels | WholePanels | MixedFormatLinear | cpu.CpuPackedLinear) -> Tensor:
    """Multiply in the weight's unquantised dtype."""
    if isinstance(packed, cpu.CpuPackedLinear):
        return cpu.linear(x_TD, packed)
    assert x_TD.dtype == packed.dtype
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    y_TN = x_TD.new_empty((len(x_TD), packed.outputs))
    at = y_TN.data_ptr()
    for part in packed.parts if isinstance(packed, MixedFormatLinear) else (packed,):
        if isinstance(part, Panels):
            _multiply(x_TD, part, at, packed.outputs)
        else:
            _multiply_whole(x_TD, part, at, packed.outputs)
        at += part.outputs * y_TN.itemsize
    return y_TN


def linear_by_head(x_THK: Tensor, packed: Panels | Tensor) -> Tensor:
    """Multiply each head by its own weight."""
    if isinstance(packed, Tensor):
        return cpu.linear_by_head(x_THK, packed)
    assert x_THK.dtype == packed.dtype
    x_THK = x_THK if x_THK.stride(2) == 1 else x_THK.contiguous()
    at, *strides = strided(x_THK, 1)
    y_THN = x_THK.new_empty((*x_THK.shape[:2], packed.outputs))
    function("linear_by_head", packed.dtype)(
        *(at, *x_THK.shape, *strides), *(pointer(packed.weight), pointer(y_THN), packed.outputs)
    )
    return y_THN


def _multiply(x_TD: Tensor, packed: Panels, to: int, by_row: int) -> None:
    """Write the outputs to an address with the given row stride."""
    (tokens, inputs), (at, by_token) = x_TD.shape, strided(x_TD, 1)
    function("linear", packed.dtype)(
        *(at, tokens, by_token, inputs),
        *(pointer(packed.weight), pointer(packed.bias_N), to, by_row, packed.outputs),
    )


def _multiply_whole(x_TD: Tensor, packed: WholePanels, to: int, by_row: int) -> None:
    (tokens, inputs), (at, by_token) = x_TD.shape, strided(x_TD, 1)
    function("linear_integer", packed.dtype)(
        *(at, tokens, by_token, inputs, packed.bits, packed.kind),
        *(pointer(packed.weight), pointer(packed.scale), pointer(packed.bias_N)),
        *(to, by_row, packed.outputs),
    )
