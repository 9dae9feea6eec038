"""The states of a group's rows as blocks for batched matrix products."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.rows import on_host

LARGE = 1 << 16
"""Bytes of a row's state from which one round of calls per row costs less than gathering all rows.

A large state is updated in place and stays in the core's cache between passes: three times as fast at 1 MiB.
"""


class Update(NamedTuple):
    """S ← scale S + k u."""

    scale_Z11: Tensor
    """[Z, 1, 1], or [Z, K, 1]."""
    k_ZKN: Tensor
    u_ZNW: Tensor


class States:
    """A group's states as blocks [Z, K, W]; Z counts heads over rows.

    The blocks are the rows themselves, or one copy of all rows that `store` writes back. The first pass,
    which loads the states anyway, applies `pending`: the update of the rows' accepted paths. With `source_B`
    the states start as copies of those slots, which do not change.
    """

    def __init__(
        self, state_SHKW: Tensor, slot_B: Tensor, pending: Update | None, source_B: Tensor | None = None
    ) -> None:
        self.state_SHKW, self.slot_B, self.pending = state_SHKW, slot_B, pending
        self.in_place = on_host(slot_B) and (
            len(slot_B) == 1 or prod(state_SHKW.shape[1:]) * state_SHKW.itemsize >= LARGE
        )
        if self.in_place:
            self.blocks = [state_SHKW[slot] for slot in slot_B.tolist()]
            if source_B is not None:
                for block_HKW, source in zip(self.blocks, source_B.tolist(), strict=True):
                    block_HKW.copy_(state_SHKW[source])
        else:
            begin_B = slot_B if source_B is None else source_B
            self.blocks = [state_SHKW.index_select(0, begin_B).flatten(0, 1)]

    def visit(self, *inputs_Z: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield each block, after applying the pending update, with its share of every input."""
        update: tuple[Tensor, ...] = self.pending or ()
        self.pending = None
        for block_ZKW, *parts_Z in zip(self.blocks, *map(self._split, (*update, *inputs_Z)), strict=True):
            if update:
                _apply(block_ZKW, *parts_Z[: len(update)])
            yield (block_ZKW, *parts_Z[len(update) :])

    def read(self, x_ZNK: Tensor) -> Tensor:
        """Return x S."""
        return _join([torch.bmm(x_ZNK, block_ZKW) for block_ZKW, x_ZNK in self.visit(x_ZNK)])

    def advance(self, update: Update) -> None:
        for block_ZKW, scale_Z11, k_ZKN, u_ZNW in self.visit(*update):
            _apply(block_ZKW, scale_Z11, k_ZKN, u_ZNW)

    def step(
        self, scale_Z11: Tensor, q_Z1K: Tensor, k_Z1K: Tensor, v_Z1W: Tensor, beta_Z11: Tensor | None
    ) -> Tensor:
        """Advance by one token and return the query's product with the new state.

        Four passes over a cached state cost less than the calls that would merge them.
        """
        inputs = [scale_Z11, q_Z1K, k_Z1K, v_Z1W]
        if beta_Z11 is not None:
            inputs.append(beta_Z11)
        o = []
        for block_ZKW, scale, q, k, u, *beta in self.visit(*inputs):
            block_ZKW.mul_(scale)
            if beta:
                u = torch.baddbmm(u, k, block_ZKW, alpha=-1).mul_(beta[0])
            block_ZKW.baddbmm_(k.mT, u)
            o.append(torch.bmm(q, block_ZKW))
        return _join(o)

    def store(self) -> None:
        """Apply a pending update and write copies back."""
        if self.pending:
            for _ in self.visit():
                pass
        if not self.in_place:
            state_BHKW = self.blocks[0].view(-1, *self.state_SHKW.shape[1:])
            self.state_SHKW.index_copy_(0, self.slot_B, state_BHKW)

    def _split(self, x_Z: Tensor) -> tuple[Tensor, ...]:
        return (x_Z,) if len(self.blocks) == 1 else x_Z.chunk(len(self.blocks))


def _apply(block_ZKW: Tensor, scale_Z11: Tensor, k_ZKN: Tensor, u_ZNW: Tensor) -> None:
    block_ZKW.mul_(scale_Z11).baddbmm_(k_ZKN, u_ZNW)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
