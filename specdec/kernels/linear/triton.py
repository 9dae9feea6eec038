"""y = x Wᵀ + b with 4-, 8- or 16-bit weights: few tokens cost as much as reading the weight once.

A program owns some rows of the weight, or part of their columns, and multiplies them with all tokens of a
narrow window. The order of sums depends only on the weight's shape, so a token's result is the same in every
narrow window. Narrower weights are converted to 16 bits in registers, which is exact; a block's scale
multiplies its partial sum.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import kernel, overlap
from specdec.kernels.linear.fp8 import BLOCK, Fp8
from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix, Stored, widen
from specdec.kernels.linear.triton_integers import Tiles, fits_tiles, lay_tiles, multiply_tiles

NARROW_WINDOW = 16
"""Widest window that is as fast as one token; for wider ones torch multiplies 16-bit weights."""
PROGRAMS = 264
"""Two per processor of an H200: enough loads in flight to use its whole bandwidth."""
LEAST_STEPS = 4
"""Minimum column blocks per program: with fewer, launching it costs more than it saves."""


class TritonLinearPart(NamedTuple):
    weight: Stored | Tiles
    bias_N: Tensor | None
    first: int
    """Output column of the part's first row."""


class TritonPackedLinear(NamedTuple):
    parts: tuple[TritonLinearPart, ...]
    rows: int


def pack(weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> TritonPackedLinear:
    """Pack a weight; the outputs of several are concatenated."""
    parts: list[TritonLinearPart] = []
    rows = 0
    for matrix in weight if isinstance(weight, list) else [weight]:
        first, rows = rows, rows + matrix.shape[0]
        parts.append(TritonLinearPart(lay(matrix), None if bias_N is None else bias_N[first:rows], first))
    return TritonPackedLinear(tuple(parts), rows)


def lay(matrix: Matrix) -> Stored | Tiles:
    """Arrange a matrix, or one per expert, for the kernels; widen it if tiles do not support its kind."""
    if isinstance(matrix, Integers):
        if fits_tiles(matrix):
            return lay_tiles(matrix)
        matrix = widen(matrix)
    if isinstance(matrix, Tensor):
        return matrix.contiguous()
    return matrix._replace(weight_ND=matrix.weight_ND.contiguous(), scale_MK=matrix.scale_MK.contiguous())


def linear(x_TD: Tensor, packed: TritonPackedLinear) -> Tensor:
    """Multiply in x's dtype, sum in float32, and round once."""
    single = packed.parts[0]
    if len(packed.parts) == 1 and (weight_ND := _for_torch(x_TD, single)) is not None:
        return F.linear(x_TD, weight_ND, single.bias_N)
    x_TD = x_TD.contiguous()
    out_TN = torch.empty(len(x_TD), packed.rows, dtype=x_TD.dtype, device=x_TD.device)
    for part in packed.parts:
        part_TN = out_TN[:, part.first : part.first + part.weight.shape[0]]
        if (weight_ND := _for_torch(x_TD, part)) is not None:
            part_TN.copy_(F.linear(x_TD, weight_ND, part.bias_N))
        else:
            _multiply(x_TD, part, part_TN)
    return out_TN


def _for_torch(x_TD: Tensor, part: TritonLinearPart) -> Tensor | None:
    """Return the weight if torch should multiply it, else None."""
    weight = part.weight
    if isinstance(weight, Tensor) and (len(x_TD) > NARROW_WINDOW or x_TD.itemsize > 2):
        return weight
    return None


class LinearTiling(NamedTuple):
    tokens: int
    rows: int
    split: int
    """Splits of the columns; a second kernel sums them."""
    warps: int
    stages: int


def depth(dtype: torch.dtype) -> int:
    """Return the columns per step; float32 needs registers for three products."""
    return BLOCK if dtype.itemsize == 2 else BLOCK // 4


def tiling(tokens: int, rows: int, columns: int) -> LinearTiling:
    """Choose a program's tile; for narrow windows it depends only on the weight."""
    if tokens > 64:
        return LinearTiling(128, 128, 1, 8, 3)
    if tokens > NARROW_WINDOW:
        return LinearTiling(triton.next_power_of_2(tokens), 64, 1, 4, 4)
    tile = 64 if rows >= 32 * PROGRAMS else 32
    return LinearTiling(NARROW_WINDOW, tile, _split(rows, columns, tile), tile // 16, 6)


def integer_tiling(x_TD: Tensor, rows: int) -> LinearTiling:
    """Choose a program's tile for integers: up to 64 tokens the order of sums depends only on the weight.

    Tiles of 32 rows use the same instruction (mma) at each height; 64 rows and four warps would use wgmma.
    """
    tokens, columns = x_TD.shape
    if tokens > 64:
        return LinearTiling(128, 128, 1, 8, 3)
    height = max(NARROW_WINDOW, triton.next_power_of_2(tokens))
    stages = 6 if height == NARROW_WINDOW else 4
    return LinearTiling(height, 32, _split(rows, columns, 32), integer_warps(height, x_TD.dtype), stages)


def integer_warps(height: int, dtype: torch.dtype) -> int:
    """Return the warps whose registers hold this many tokens; float32 needs them for three products."""
    return max(2, height // 16) if dtype.itemsize == 2 else 8


def _split(rows: int, columns: int, tile: int) -> int:
    split, steps = 1, -(-columns // BLOCK)
    while split * -(-rows // tile) < PROGRAMS and steps >= 2 * split * LEAST_STEPS:
        split *= 2
    return split


def _multiply(x_TD: Tensor, part: TritonLinearPart, out_TN: Tensor) -> None:
    """Write the product; column splits write float32 sums that a second kernel adds."""
    weight, (tokens, columns), rows = part.weight, x_TD.shape, part.weight.shape[0]
    tile = integer_tiling(x_TD, rows) if isinstance(weight, Tiles) else tiling(tokens, rows, columns)
    if tile.split == 1:
        to, by_part, by_token, bias_N = out_TN, 0, out_TN.stride(0), part.bias_N
    else:
        to = torch.empty(tile.split, tokens, rows, dtype=torch.float32, device=x_TD.device)
        by_part, by_token, bias_N = to.stride(0), to.stride(1), None
    grid = (triton.cdiv(rows, tile.rows), tile.split, triton.cdiv(tokens, tile.tokens))
    if isinstance(weight, Tiles):
        _linear_integers[grid](
            *(x_TD, weight.number, weight.scale, bias_N, to),
            *(tokens, by_token, by_part),
            N=rows,
            D=columns,
            BITS=weight.bits,
            SPLIT=tile.split,
            BLOCK_T=tile.tokens,
            BLOCK_N=tile.rows,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    else:
        _linear[grid](
            x_TD,
            *((weight.weight_ND, weight.scale_MK) if isinstance(weight, Fp8) else (weight, None)),
            bias_N,
            to,
            *(tokens, by_token, by_part),
            N=rows,
            D=columns,
            SPLIT=tile.split,
            BLOCK_T=tile.tokens,
            BLOCK_N=tile.rows,
            BLOCK_D=depth(x_TD.dtype),
            SIDE=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if tile.split > 1:
        _add_parts[(tokens, triton.cdiv(rows, 1024))](
            to, part.bias_N, out_TN, tokens, out_TN.stride(0), N=rows, SPLIT=tile.split, BLOCK=1024
        )


@kernel(do_not_specialize=["tokens", "out_by_part"])
def _linear(
    x, weight, scale, bias, out, tokens, out_by_token, out_by_part,
    N: tl.constexpr, D: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    overlap()
    row = tl.program_id(0) * BLOCK_N
    at_N = tl.arange(0, BLOCK_N)
    at_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    at_D = tl.arange(0, BLOCK_D)
    steps: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    steps_per_split: tl.constexpr = (steps + SPLIT - 1) // SPLIT
    first = tl.program_id(1) * steps_per_split
    in_N = row + at_N < N
    in_T = at_T < tokens
    x += at_T[:, None].to(tl.int64) * D
    weight += row.to(tl.int64) * D + at_N[:, None] * D
    if scale is not None:
        scale += row // SIDE * ((D + SIDE - 1) // SIDE)
    sum_TN = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        column = step * BLOCK_D + at_D
        mask_TD, mask_ND = in_T[:, None], in_N[:, None]
        if D % BLOCK_D:
            mask_TD &= column[None, :] < D
            mask_ND &= column[None, :] < D
        b_x = tl.load(x + column[None, :], mask=mask_TD, other=0.0)
        b_weight = tl.load(weight + column[None, :], mask=mask_ND, other=0.0)
        if scale is not None:
            # Convert by way of float16 and float32, which run at full speed; direct conversion to bfloat16
            # does not.
            b_weight = b_weight.to(tl.float16).to(tl.float32).to(b_x.dtype)
        added_TN = tl.dot(b_x, tl.trans(b_weight), input_precision="tf32x3")
        if scale is not None:
            added_TN *= tl.load(scale + step * BLOCK_D // SIDE)
        sum_TN += added_TN
    if bias is not None:
        sum_TN += tl.load(bias + row + at_N, mask=in_N, other=0.0).to(tl.float32)[None, :]
    out += tl.program_id(1).to(tl.int64) * out_by_part + at_T[:, None].to(tl.int64) * out_by_token
    tl.store(out + row + at_N[None, :], sum_TN.to(out.dtype.element_ty), mask=in_T[:, None] & in_N[None, :])


@kernel(do_not_specialize=["tokens", "out_by_part"])
def _linear_integers(
    x, number, scale, bias, out, tokens, out_by_token, out_by_part,
    N: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    overlap()
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_T = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_N, in_T = row_N < N, at_T < tokens
    part = tl.program_id(1)
    x += at_T[None, :].to(tl.int64) * D
    sum_NT = multiply_tiles(x, in_T, number, scale, 0, row_N, in_N, part, N, D, BITS, SPLIT, BLOCK_T, BLOCK_N)
    if bias is not None:
        sum_NT += tl.load(bias + row_N, mask=in_N, other=0.0).to(tl.float32)[:, None]
    out += part.to(tl.int64) * out_by_part + at_T[None, :].to(tl.int64) * out_by_token
    tl.store(out + row_N[:, None], sum_NT.to(out.dtype.element_ty), mask=in_N[:, None] & in_T[None, :])


@kernel(do_not_specialize=["tokens"])
def _add_parts(
    parts, bias, out, tokens, out_by_token, N: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * tokens + token) * N + at, mask=mask, other=0.0)
    if bias is not None:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_by_token + at, total.to(out.dtype.element_ty), mask=mask)
