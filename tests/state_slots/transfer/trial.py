"""Copy by plans between arenas with slices of one model's memory, and compare every byte."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.state_slots.layout import Layout, StateShape
from specdec.state_slots.transfer.model_layout import ModelLayout
from specdec.state_slots.transfer.plan import ArenaView, make_plans
from specdec.state_slots.views import page_views, recurrent_views


class Side(NamedTuple):
    """An arena's slots, which differ from the other side's, and its fill value elsewhere."""

    slabs: int
    blocks: tuple[int, int]
    """Slabs of its blocks: the first block of the first slab, the last block of the second."""
    state: int
    poison: int


WHOLE, REMOTE, LOCAL = Side(4, (1, 2), 3, 0), Side(5, (3, 1), 2, 0xEE), Side(7, (2, 5), 4, 0xFF)


class Rank:
    """One rank's poisoned arena, with two blocks and a state slot in use."""

    def __init__(self, cut: ModelLayout, tp: int, rank: int, side: Side) -> None:
        self.layout, size = cut.layout(tp), side.slabs * cut.layout(tp).slab_bytes
        self.data = torch.full((size,), side.poison, dtype=torch.uint8)
        self.view = ArenaView(1 + rank << 40, size, cut, tp, rank, device=rank % 3)
        per, (first, second) = self.layout.blocks_per_slab, side.blocks
        self.blocks = [first * per, (second + 1) * per - 1] if per else []
        self.state = side.state if self.layout.states else None

    def tensors(self) -> list[Tensor]:
        """Return views of all layers in these slots."""
        pages, recurrent = page_views(self.data, self.layout), recurrent_views(self.data, self.layout)
        states = [part[self.state] for own in recurrent for part in (own.state_SHKW, own.window_SIC)]
        return [page[block] for block in self.blocks for page in pages] + states

    def fill(self, whole: "Rank") -> None:
        """Fill the slots with this rank's slices of a whole model's memory."""
        for own, part in zip(self.tensors(), self._slices(whole), strict=True):
            own.copy_(part)

    def wipe(self, value: int) -> None:
        """Set all bytes of these slots, padding included."""
        if self.blocks:
            self.data.view(-1, self.layout.block_bytes)[self.blocks] = value
        if self.state is not None:
            self.data.view(-1, self.layout.slab_bytes)[self.state, : self.layout.state_bytes] = value

    def resolve(self, rows: NDArray[np.int64], picked: NDArray[np.int32]) -> list[NDArray[np.uint8]]:
        """Resolve descriptors as NIXL does, and check that each is inside the arena."""
        base, size = self.view.base, self.view.num_bytes
        spans = [
            (at - base + number * stride, length)
            for at, length, _, stride, count in rows.tolist()
            for number in range(count)
        ]
        assert all(start >= 0 and length > 0 and start + length <= size for start, length in spans)
        assert set(rows[:, 2]) == {self.view.device}
        return [self.data.numpy()[start : start + length] for start, length in (spans[i] for i in picked)]

    def _slices(self, whole: "Rank") -> Iterator[Tensor]:
        tp, rank, left = self.view.tp, self.view.rank, iter(whole.tensors())
        for kv in whole.layout.kv * len(whole.blocks):
            first = rank * kv.heads // tp
            yield next(left)[:, :, first : first + max(1, kv.heads // tp)]
        for state in whole.layout.states:
            state_HKW, window_IC = next(left), next(left)
            yield state_HKW.chunk(tp, dim=2 if state.heads == 1 else 0)[rank] if state.heads else state_HKW
            yield _window(window_IC, state, tp, rank) if tp > 1 else window_IC


def _window(window_IC: Tensor, state: StateShape, tp: int, rank: int) -> Tensor:
    projections = window_IC.split([units * width for units, width in state.runs], dim=1)
    return torch.cat([own_IC.chunk(tp, dim=1)[rank] for own_IC in projections], dim=1)


def read(local: Rank, remotes: Sequence[Rank], planned: ModelLayout) -> None:
    """Read everything that plans for this cut describe, as carriers would."""
    views = [ArenaView(**{**_fields(own.view), "cut": planned}) for own in (local, *remotes)]
    for rank, plan in make_plans(views[0], views[1:]).items():
        blocks = list(zip(local.blocks, remotes[rank].blocks, strict=True))
        state = None if local.state is None else (local.state, remotes[rank].state)
        ours, theirs = plan.pick(blocks, state)
        spans = zip(local.resolve(plan.local, ours), remotes[rank].resolve(plan.remote, theirs), strict=True)
        count = 0
        for to, source in spans:
            assert len(to) == len(source)
            to[:] = source
            count += len(to)
        assert count == plan.num_bytes(len(blocks), int(state is not None))


def _fields(view: ArenaView) -> dict[str, object]:
    return {name: getattr(view, name) for name in ("base", "num_bytes", "tp", "rank", "device")}


def check_landing(layout: Layout, remote_tp: int, local_tp: int, planned: ModelLayout | None = None) -> None:
    """Read slices of random bytes into every local rank, and compare all its bytes.

    `planned` is the cut to plan with, if a test uses a wrong one.
    """
    cut = ModelLayout.of(layout)
    whole = Rank(cut, 1, 0, WHOLE)
    whole.data.random_(0, 256, generator=torch.Generator().manual_seed(3))
    remotes = [Rank(cut, remote_tp, rank, REMOTE) for rank in range(remote_tp)]
    for remote in remotes:
        remote.fill(whole)
    for rank in range(local_tp):
        local, expected = (Rank(cut, local_tp, rank, LOCAL) for _ in range(2))
        if remote_tp == local_tp:
            expected.wipe(REMOTE.poison)  # slots are read whole, with the padding between their parts
        expected.fill(whole)
        read(local, remotes, planned or cut)
        assert torch.equal(local.data, expected.data)
