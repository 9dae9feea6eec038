"""FP8 weights: float8_e4m3fn with a float32 scale per block of 128 by 128.

This is the published checkpoint layout: a weight is its FP8 value times the scale of its block.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0
"""Largest finite float8_e4m3fn value."""

output = None
"""The output matrix, which makes logits, is not quantised."""
rounds_fp8 = False
"""FP8 checkpoints are not quantised again."""


class Fp8(NamedTuple):
    """An FP8 matrix [N, D], or one per expert [E, N, D]; blocks at the edges may be smaller."""

    weight_ND: Tensor
    scale_MK: Tensor
    dtype: torch.dtype = torch.bfloat16
    """The dtype after dequantisation: the model's."""

    @property
    def shape(self) -> torch.Size:
        return self.weight_ND.shape

    @property
    def device(self) -> torch.device:
        return self.weight_ND.device

    def expert(self, expert: int) -> "Fp8":
        return self._replace(weight_ND=self.weight_ND[expert], scale_MK=self.scale_MK[expert])

    def above(self, below: "Fp8") -> "Fp8 | None":
        """Stack a matrix below this one; None if dtypes differ or a block would be split."""
        if self.shape[0] % BLOCK or self.dtype != below.dtype:
            return None
        weight_ND = torch.cat([matrix.weight_ND.view(torch.uint8) for matrix in (self, below)])
        scale_MK = torch.cat([self.scale_MK, below.scale_MK])
        return Fp8(weight_ND.view(torch.float8_e4m3fn), scale_MK, self.dtype)

    def wide(self) -> Tensor:
        """Dequantise to float32."""
        return self.weight_ND.float() * spread(self.scale_MK, self.shape)


def block_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a matrix's scales."""
    *experts, rows, columns = shape
    return *experts, -(-rows // BLOCK), -(-columns // BLOCK)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Fp8:
    """Allocate a matrix."""
    weight_ND = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device=device)
    return Fp8(weight_ND, torch.empty(block_shape(shape), dtype=torch.float32, device=device), dtype)


def quantise(weight_ND: Tensor | Fp8) -> Fp8:
    """Quantise a weight to FP8; each block's largest entry becomes the largest FP8 value.

    Experts are quantised one by one: there is only memory for a few copies of one matrix besides the result.
    """
    if isinstance(weight_ND, Fp8):
        return weight_ND
    out = empty(weight_ND.shape, weight_ND.dtype, weight_ND.device)
    if weight_ND.dim() == 3:
        for expert_ND, to_ND, to_MK in zip(weight_ND, out.weight_ND, out.scale_MK, strict=True):
            quantised = quantise(expert_ND)
            to_ND.copy_(quantised.weight_ND)
            to_MK.copy_(quantised.scale_MK)
        return out
    wide_ND = weight_ND.float()
    rows, columns = (count * BLOCK for count in out.scale_MK.shape)
    padded = torch.nn.functional.pad(wide_ND, (0, columns - wide_ND.shape[1], 0, rows - wide_ND.shape[0]))
    largest_MK = padded.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).abs().amax((1, 3))
    scale_MK = largest_MK / LARGEST
    out.scale_MK.copy_(torch.where(scale_MK > 0, scale_MK, 1.0))
    # Rounding may push the quotient above the largest value, beyond which there is only NaN.
    out.weight_ND.copy_((wide_ND / spread(out.scale_MK, wide_ND.shape)).clamp_(-LARGEST, LARGEST))
    return out


def spread(scale_MK: Tensor, shape: Sequence[int]) -> Tensor:
    """Return each entry's scale."""
    scale_ND = scale_MK.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return scale_ND[..., : shape[-2], : shape[-1]]


def choose_rows(matrix: Fp8, index_N: Tensor) -> Fp8 | None:
    """Select rows in the given order; None if a block would combine rows with different scales."""
    block_N = index_N // BLOCK
    block_M = block_N[::BLOCK]
    if not torch.equal(block_N, block_M.repeat_interleave(BLOCK)[: len(index_N)]):
        return None
    numbers = matrix.weight_ND.view(torch.uint8)[index_N.to(matrix.device)]
    scale_MK = matrix.scale_MK[block_M.to(matrix.device)]
    return Fp8(numbers.view(torch.float8_e4m3fn), scale_MK, matrix.dtype)


def num_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of a matrix of this shape, including scales."""
    return prod(shape) + 4 * prod(block_shape(shape))
