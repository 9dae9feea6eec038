"""Rotary position embedding: which part of a head is rotated, and the tables of all positions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies divided by a factor for a longer context, as in Llama 3.1; fast ones stay."""

    factor: float
    low: float
    """A wavelength that fits less often into the original context is slow."""
    high: float
    """One that fits more often is fast; between the two lies a linear blend."""
    context: int
    """The length of the original context."""

    def __call__(self, frequency_R: Tensor) -> Tensor:
        """Scale float32 frequencies, rounding where transformers does."""
        wavelength_R = 2 * math.pi / frequency_R
        blend_R = (self.context / wavelength_R - self.low) / (self.high - self.low)
        blended_R = (1 - blend_R) * frequency_R / self.factor + blend_R * frequency_R
        slow_R, fast_R = (wavelength_R > self.context / self.low), (wavelength_R < self.context / self.high)
        return torch.where(fast_R, frequency_R, torch.where(slow_R, frequency_R / self.factor, blended_R))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the first `dim` entries of a head, or some of their pairs."""

    dim: int
    theta: float
    turned: int | None = None
    """Pairs that turn, the fastest; the others stay. None: all do."""
    wide: bool = False
    """In float32, rounded once; otherwise each product is rounded."""
    scaling: Llama3Scaling | None = None


Rotations = Mapping[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines, of all positions or of a window's."""


def rope_tables(
    ropes: Iterable[Rope], max_length: int, kernels: Kernels, device: torch.device
) -> dict[Rope, tuple[Tensor, Tensor]]:
    """Tabulate cosines and sines of every position once."""
    position_T = torch.arange(max_length, device=device)
    tables = {rope: kernels.rope_table(position_T, rope.dim, rope.theta, rope.scaling) for rope in set(ropes)}
    for rope, (cos_LR, sin_LR) in tables.items():
        if rope.turned is not None:
            cos_LR[..., rope.turned :], sin_LR[..., rope.turned :] = 1.0, 0.0
    return tables
