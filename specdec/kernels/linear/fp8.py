"""Weights of eight bits: float8 numbers, and a float32 scale for each block of 128 by 128 of them.

This is the layout in which models are published: a weight is its number times the scale of its block.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
"""The largest number that float8_e4m3fn holds."""


class Fp8(NamedTuple):
    """A matrix [N, D], or one of each expert [E, N, D], in blocks whose last ones may be cut off."""

    weight_ND: Tensor
    scale_MK: Tensor
    dtype: torch.dtype = torch.bfloat16
    """What the matrix stands for: the model's dtype."""

    @property
    def shape(self) -> torch.Size:
        return self.weight_ND.shape

    @property
    def device(self) -> torch.device:
        return self.weight_ND.device


Matrix = Tensor | Fp8


def block_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a matrix's scales."""
    *experts, rows, columns = shape
    return *experts, -(-rows // BLOCK), -(-columns // BLOCK)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Fp8:
    """Return room for a matrix."""
    weight_ND = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    return Fp8(weight_ND, torch.empty(block_shape(shape), dtype=torch.float32, device=device), dtype)


def quantise(weight_ND: Tensor) -> Fp8:
    """Round a weight to eight bits; each block's largest entry becomes the largest number.

    Experts are rounded one by one: beside the result there is memory for a few copies of one matrix.
    """
    out = empty(weight_ND.shape, weight_ND.dtype, weight_ND.device)
    if weight_ND.dim() == 3:
        for own_ND, to_ND, to_MK in zip(weight_ND, out.weight_ND, out.scale_MK, strict=True):
            narrow = quantise(own_ND)
            to_ND.copy_(narrow.weight_ND)
            to_MK.copy_(narrow.scale_MK)
        return out
    wide_ND = weight_ND.float()
    rows, columns = (count * BLOCK for count in out.scale_MK.shape)
    padded = torch.nn.functional.pad(wide_ND, (0, columns - wide_ND.shape[1], 0, rows - wide_ND.shape[0]))
    largest_MK = padded.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3))
    scale_MK = largest_MK / LARGEST
    out.scale_MK.copy_(torch.where(scale_MK > 0, scale_MK, 1.0))
    # The quotient may come out a rounding above the largest number, which has no number above it but NaN.
    out.weight_ND.copy_((wide_ND / spread(out.scale_MK, wide_ND.shape)).clamp_(-LARGEST, LARGEST))
    return out


def spread(scale_MK: Tensor, shape: Sequence[int]) -> Tensor:
    """Return each entry's scale."""
    scale_ND = scale_MK.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return scale_ND[..., : shape[-2], : shape[-1]]


def widen(matrix: Matrix, dtype: torch.dtype | None = None) -> Tensor:
    """Return a matrix as an ordinary tensor, in the dtype that it stands for if nothing else is said.

    The product of number and scale is float32's. Experts are widened one by one.
    """
    dtype = dtype or matrix.dtype
    if isinstance(matrix, Tensor):
        return matrix.to(dtype)
    if len(matrix.shape) == 3:
        out_END = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
        for expert, out_ND in enumerate(out_END):
            out_ND.copy_(widen(expert_of(matrix, expert), dtype))
        return out_END
    return (matrix.weight_ND.float() * spread(matrix.scale_MK, matrix.shape)).to(dtype)


def expert_of(matrix: Matrix, expert: int) -> Matrix:
    """View one expert's matrix."""
    if isinstance(matrix, Tensor):
        return matrix[expert]
    return Fp8(matrix.weight_ND[expert], matrix.scale_MK[expert], matrix.dtype)


def join(parts: Sequence[Matrix]) -> list[Matrix]:
    """Put matrices of one width below one another where they are alike and whole blocks stay whole.

    What cannot be joined stays a part of its own.
    """
    runs: list[list[Matrix]] = []
    for part in parts:
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_below(run) if len(run) > 1 else run[0] for run in runs]


def _continues(above: Matrix, below: Matrix) -> bool:
    if isinstance(above, Fp8):
        return isinstance(below, Fp8) and above.shape[0] % BLOCK == 0 and above.dtype == below.dtype
    return isinstance(below, Tensor)


def _below(run: Sequence[Matrix]) -> Matrix:
    if isinstance(run[0], Tensor):
        return torch.cat([part for part in run if isinstance(part, Tensor)])
    narrow = [part for part in run if isinstance(part, Fp8)]
    weight_ND = torch.cat([part.weight_ND.view(torch.uint8) for part in narrow])
    scale_MK = torch.cat([part.scale_MK for part in narrow])
    return Fp8(weight_ND.view(torch.float8_e4m3fn), scale_MK, narrow[0].dtype)


def choose_rows(matrix: Fp8, index_N: Tensor) -> Fp8 | None:
    """Choose rows in the order given; None where that would tear blocks apart."""
    count = len(index_N)
    first_M = index_N[::BLOCK]
    straight_N = first_M.repeat_interleave(BLOCK)[:count] + torch.arange(count) % BLOCK
    if count % BLOCK or bool((first_M % BLOCK).any()) or not torch.equal(index_N, straight_N):
        return None
    numbers = matrix.weight_ND.view(torch.uint8)[index_N.to(matrix.device)]
    scale_MK = matrix.scale_MK[(first_M // BLOCK).to(matrix.device)]
    return Fp8(numbers.view(torch.float8_e4m3fn), scale_MK, matrix.dtype)


def num_bytes(shape: Sequence[int]) -> int:
    """Count the bytes of a matrix of this shape, scales included."""
    return prod(shape) + 4 * prod(block_shape(shape))
