"""Integer weights in the GPU's tile layout; activations stay in 16 bits.

A matrix is cut into tiles of 16 outputs by 64 inputs; tiles of the same outputs are adjacent in memory. With
4 bits a byte holds one input each of two neighbouring groups: the low nibble is the first group's integer
plus 8, the high nibble the second's, which is sixteen times its value in place; a mask extracts either
without a shift. Products with activations are summed in float32, and a scale multiplies its group's sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.linear.integers import GROUP, Integers

PANEL = 16
COLUMNS = 2 * GROUP


class Tiles(NamedTuple):
    """A matrix [N, D], or one per expert [E, N, D]."""

    number: Tensor
    """Tiles [N / 16, D / 64, 16, 64], or with 4 bits [N / 16, D / 64, 16, 32]."""
    scale: Tensor
    """8 bits: [N] in float32. 4 bits: [N, D / 32] in 16 bits."""
    bits: int
    shape: torch.Size


def fits_tiles(matrix: Integers) -> bool:
    """Return whether tiles support a matrix: the kinds that our own quantisation produces."""
    plain = matrix.zero_NG is None and matrix.offset_NG is None and matrix.group == GROUP
    return plain and matrix.bits != 6 and matrix.by_group == (matrix.bits == 4)


def lay_tiles(matrix: Integers) -> Tiles:
    """Pack a matrix; experts one by one, since there is only memory for a few copies of one."""
    *experts, rows, columns = matrix.shape
    panels, across = triton.cdiv(rows, PANEL), triton.cdiv(columns, COLUMNS)
    size = (*experts, panels, across, PANEL, COLUMNS * matrix.bits // 8)
    number = torch.empty(size, dtype=torch.int8, device=matrix.device)
    write_tiles(matrix, number)
    return Tiles(number, matrix.scale.contiguous(), matrix.bits, matrix.shape)


def write_tiles(matrix: Integers, number: Tensor) -> None:
    """Fill the tiles, padding rows and columns with zeros."""
    if len(matrix.shape) == 3:
        for expert, expert_tiles in enumerate(number):
            write_tiles(matrix.expert(expert), expert_tiles)
        return
    (rows, columns), (panels, across) = matrix.shape, number.shape[:2]
    filled = matrix.number_ND.new_zeros(panels * PANEL, across * COLUMNS)
    filled[:rows, :columns] = matrix.number_ND
    if matrix.bits == 4:
        low, high = filled.view(len(filled), across, 2, GROUP).unbind(2)
        filled = low + 8 | high << 4
    number.copy_(filled.view(panels, PANEL, across, -1).transpose(1, 2))


@triton.jit
def multiply_tiles(
    x, in_T, number, scale, expert, row_N, in_N, part,
    ROWS: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return an expert's rows times the tokens at x [N, T], or one column split's contribution.

    The order of a token's sums depends neither on other tokens nor on the tile's size.
    """
    GROUPS: tl.constexpr = 8 // BITS  # groups that share a tile's bytes
    SPAN: tl.constexpr = 64 // GROUPS
    AT_ONCE: tl.constexpr = 2 if BLOCK_T <= 64 else 1
    across: tl.constexpr = (D + 63) // 64
    steps: tl.constexpr = (across + AT_ONCE - 1) // AT_ONCE
    steps_per_split: tl.constexpr = (steps + SPLIT - 1) // SPLIT
    at_D = tl.arange(0, SPAN)
    kind = x.dtype.element_ty
    panel_N = (row_N // 16).to(tl.int64) + expert * ((ROWS + 15) // 16)
    number += panel_N[:, None] * (across * 16 * SPAN) + (row_N % 16)[:, None] * SPAN + at_D[None, :]
    scale += (row_N.to(tl.int64) + expert * ROWS) * ((D + 31) // 32 if BITS == 4 else 1)
    sum_NT = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(part * steps_per_split, tl.minimum((part + 1) * steps_per_split, steps)):
        for second in tl.static_range(AT_ONCE):
            tile = step * AT_ONCE + second
            mask_N = in_N
            if across % AT_ONCE:
                mask_N &= tile < across
            b_number = tl.load(number + tile * (16 * SPAN), mask=mask_N[:, None], other=0)
            for group in tl.static_range(GROUPS):
                column = tile * 64 + group * SPAN + at_D
                mask_TD = in_T[None, :]
                if D % (64 * AT_ONCE):
                    mask_TD &= column[:, None] < D
                b_x = tl.load(x + column[:, None], mask=mask_TD, other=0.0)
                if BITS == 8:
                    b_int = b_number.to(tl.float32).to(kind)
                    sum_NT = tl.dot(b_int, b_x, sum_NT, input_precision="tf32x3")
                else:
                    if group == 0:
                        b_int = (b_number & 15).to(tl.float32).to(kind) - 8
                    else:
                        b_int = (b_number & -16).to(tl.float32).to(kind)
                    added_NT = tl.dot(b_int, b_x, input_precision="tf32x3")
                    if D % (64 * AT_ONCE):
                        mask_N = in_N & (tile * 64 + group * SPAN < D)
                    scale_N = tl.load(scale + tile * 2 + group, mask=mask_N, other=0.0).to(tl.float32)
                    sum_NT += added_NT * (scale_N * (1.0 if group == 0 else 0.0625))[:, None]
    if BITS == 8:
        sum_NT *= tl.load(scale, mask=in_N, other=0.0)[:, None]
    return sum_NT
