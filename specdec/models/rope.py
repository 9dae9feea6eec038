"""Rotary position embedding: which part of a head is rotated, and the tables of all positions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.table import Kernels


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate the first `dim` entries of a head, or some of their pairs."""

    dim: int
    theta: float
    turned: int | None = None
    """Pairs that turn, the fastest; the others stay. None: all do."""
    wide: bool = False
    """In float32, rounded once; otherwise each product is rounded."""


Rotations = Mapping[Rope, tuple[Tensor, Tensor]]
"""Cosines and sines, of all positions or of a window's."""


def rope_tables(
    ropes: Iterable[Rope], max_length: int, kernels: Kernels, device: torch.device
) -> dict[Rope, tuple[Tensor, Tensor]]:
    """Tabulate cosines and sines of every position once."""
    position_T = torch.arange(max_length, device=device)
    tables = {rope: kernels.rope_table(position_T, rope.dim, rope.theta) for rope in set(ropes)}
    for rope, (cos_LR, sin_LR) in tables.items():
        if rope.turned is not None:
            cos_LR[..., rope.turned :], sin_LR[..., rope.turned :] = 1.0, 0.0
    return tables
