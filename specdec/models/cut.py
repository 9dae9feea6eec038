"""How a tensor is divided among the ranks of a tensor-parallel group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank keeps its part of each run along one dimension, in order."""

    dim: int
    runs: Sequence[int]
    """Sizes of the runs in the whole tensor. Empty: rank 0 keeps the tensor, and others
    get zeros, as each rank's part of a sum."""
    copies: int = 1
    """Number of consecutive ranks that keep the same part: KV heads may be fewer than ranks."""

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor of which a part has this shape."""
        if not self.runs:
            return tuple(shape)
        return (*shape[: self.dim], sum(self.runs), *shape[self.dim + 1 :])

    def part(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """Copy a rank's part into its own memory."""
        if not self.runs:
            return tensor if rank == 0 else torch.zeros_like(tensor)
        parts = ranks // self.copies
        pieces = [
            run.narrow(self.dim, ids.start, len(ids))
            for run, size in zip(torch.split(tensor, list(self.runs), self.dim), self.runs, strict=True)
            if (ids := share(size, rank // self.copies, parts))
        ]
        return torch.cat(pieces, self.dim)


ADDED_ONCE = Cut(0, ())
"""The bias of a product whose parts are summed over the ranks."""


def rows(*runs: int) -> Cut:
    """Return a cut of output rows."""
    return Cut(0, runs)


def columns(*runs: int) -> Cut:
    """Return a cut of input columns; the products of the parts are summed."""
    return Cut(1, runs)


def share(count: int, rank: int, ranks: int) -> range:
    """Return a rank's ids of `count`, which need not divide."""
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def divided(count: int, ranks: int, noun: str) -> int:
    """Return a rank's share of `count` heads, groups or columns; raise if they do not divide."""
    if count % ranks:
        raise ConfigError(
            f"tp: {ranks} ranks cannot share {count} {noun} evenly; lower tp to a divisor of {count}.",
            field="tp",
        )
    return count // ranks
