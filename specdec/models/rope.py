"""Rotary position embeddings: rotated entries, and tables of all positions."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies divided by a factor for a longer context, as in Llama 3.1; fast ones are unchanged."""

    factor: float
    low: float
    """Wavelengths that fit fewer times into the original context are slow."""
    high: float
    """Wavelengths that fit more times are fast; frequencies between are blended linearly."""
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
class LinearScaling:
    """All frequencies divided by a factor."""

    factor: float

    def __call__(self, frequency_R: Tensor) -> Tensor:
        return frequency_R / self.factor


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Slow frequencies divided by a factor, fast ones unchanged, a linear ramp between (arXiv 2309.00071)."""

    theta: float
    factor: float
    context: int
    """The length of the original context."""
    fast: float
    """Turns in the original context above which a frequency is unchanged."""
    slow: float
    """Turns below which a frequency is divided."""
    truncate: bool
    """Round the ramp's ends to whole pairs."""
    attention: float
    """Factor of cosines and sines."""

    @property
    def length(self) -> int:
        """Return the length of the longer context."""
        return int(self.factor * self.context)

    def __call__(self, frequency_R: Tensor) -> Tensor:
        """Scale float32 frequencies, rounding where transformers does: it divides by powers of theta."""
        dim = 2 * len(frequency_R)
        first, last = self._pair(self.fast, dim), self._pair(self.slow, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001
        pair_R = torch.arange(dim // 2, dtype=torch.float32, device=frequency_R.device)
        kept_R = 1 - ((pair_R - first) / width).clamp(0, 1)
        power_R = self.theta ** (torch.arange(0, dim, 2, device=frequency_R.device).float() / dim)
        return 1.0 / (self.factor * power_R) * (1 - kept_R) + frequency_R * kept_R

    def _pair(self, turns: float, dim: int) -> float:
        """Return the (fractional) pair with this many turns in the original context."""
        return dim * math.log(self.context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, which offsets flatter scores over a longer context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates the first `dim` entries of a head, or some of their pairs."""

    dim: int
    theta: float
    turned: int | None = None
    """Number of rotated pairs, the fastest ones. None: all."""
    wide: bool = False
    """Compute in float32 and round once; False: round each product."""
    scaling: Scaling | None = None


Rotations = Mapping[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines, of all positions or of a window's."""


def rope_tables(
    ropes: Iterable[Rope], max_length: int, kernels: Kernels, device: torch.device
) -> dict[Rope, tuple[Tensor, Tensor]]:
    """Compute cosines and sines of every position."""
    position_T = torch.arange(max_length, device=device)
    tables = {rope: kernels.rope_table(position_T, rope.dim, rope.theta, rope.scaling) for rope in set(ropes)}
    for rope, (cos_LR, sin_LR) in tables.items():
        if isinstance(rope.scaling, YarnScaling):
            cos_LR *= rope.scaling.attention
            sin_LR *= rope.scaling.attention
        if rope.turned is not None:
            cos_LR[..., rope.turned :], sin_LR[..., rope.turned :] = 1.0, 0.0
    return tables
