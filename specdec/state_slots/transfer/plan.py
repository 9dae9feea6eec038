"""Plan which bytes of a peer's arenas a rank reads, and their destinations in its own arena."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from specdec.errors import ConfigError
from specdec.state_slots.layout import Layout
from specdec.state_slots.transfer.model_layout import ModelLayout
from specdec.state_slots.transfer.rank_parts import ByteRun, RankUnits, block_parts, common_runs, state_parts

MAX_ADDRESS = (1 << 63) - 1
MAX_DESCRIPTORS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ArenaView:
    """Address and layout of one rank's arena, for a peer that reads from it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    base: int
    """Address of its first byte."""
    num_bytes: int
    cut: ModelLayout
    tp: int
    rank: int
    device: int

    def as_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return asdict(self)

    def layout(self) -> Layout:
        """Return this rank's layout; refuse an inconsistent arena."""
        if not 0 <= self.rank < self.tp:
            raise ConfigError(f"rank is {self.rank} of tp {self.tp}: give one from 0 to tp - 1", field="rank")
        if self.device < 0:
            raise ConfigError(f"device is {self.device}: give a device's number", field="device")
        layout = self.cut.layout(self.tp)
        slabs, remainder = divmod(self.num_bytes, layout.slab_bytes)
        if slabs < 2 or remainder:
            raise ConfigError(
                f"num_bytes is {self.num_bytes}, which is not two or more slabs of {layout.slab_bytes} "
                "bytes: start both engines from the same build",
                field="num_bytes",
            )
        if not 0 < self.base <= MAX_ADDRESS - self.num_bytes:
            raise ConfigError(
                f"base is {self.base}, which is no address of {self.num_bytes} bytes", field="base"
            )
        return layout


_VIEW = TypeAdapter(ArenaView)


def read_view(value: object) -> ArenaView:
    """Parse a peer's JSON; errors name missing, unknown or mistyped fields."""
    try:
        return _VIEW.validate_json(json.dumps(value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            f"{field or 'the arena'} as sent by the peer cannot be parsed ({problem['msg']}): "
            "start both engines from the same build",
            field=field or None,
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Descriptors of everything that a rank may read from one rank of a peer.

    A row (address, length, device, stride, count) represents `count` descriptors, one per block or state slot
    of an arena. Rows of both sides correspond, blocks first; only their counts differ.
    """

    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    block_rows: int

    def pick(
        self, blocks: Sequence[tuple[int, int]], state: tuple[int, int] | None
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return local and remote descriptors of blocks and of a state, each given as (local, remote)."""
        states = [] if state is None else [state]
        local, remote = (
            self._descriptors(rows, [pair[side] for pair in blocks], [pair[side] for pair in states])
            for side, rows in enumerate((self.local, self.remote))
        )
        return local, remote

    def num_bytes(self, blocks: int, states: int) -> int:
        """Return the transferred bytes of blocks and states."""
        lengths = self.local[:, 1]
        return blocks * int(lengths[: self.block_rows].sum()) + states * int(lengths[self.block_rows :].sum())

    def _descriptors(
        self, rows: NDArray[np.int64], blocks: Sequence[int], states: Sequence[int]
    ) -> NDArray[np.int32]:
        counts = rows[:, 4]
        first = np.cumsum(counts) - counts
        row_slices = slice(self.block_rows), slice(self.block_rows, None)
        picked = []
        for name, ids, of in (("blocks", blocks, row_slices[0]), ("state", states, row_slices[1])):
            if counts[of].size:
                _check_ids(name, ids, int(counts[of][0]))
                picked.append((first[of, None] + np.array(ids, np.int64)).ravel())
        return np.concatenate(picked).astype(np.int32)


def make_plans(local: ArenaView, remotes: Sequence[ArenaView]) -> dict[int, TransferPlan]:
    """Plan the local rank's reads from each rank of a peer that has data for it, by that rank.

    `remotes` are all ranks of the peer. Every byte of a slot except padding is read from one of them.
    """
    _check_peer(local, remotes)
    plans = {}
    for remote in remotes:
        blocks, states = _runs(local, remote)
        if blocks or states:
            plans[remote.rank] = TransferPlan(
                _rows(local, blocks, states, lambda run: run.ours),
                _rows(remote, blocks, states, lambda run: run.theirs),
                len(blocks),
            )
    return plans


def _check_ids(name: str, ids: Sequence[int], count: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < count:
        raise ConfigError(
            f"{name} has ids from {min(ids)} to {max(ids)}, of {count} in the arena", field=name
        )


def _check_peer(local: ArenaView, remotes: Sequence[ArenaView]) -> None:
    """Refuse a peer of another layout, or with missing ranks."""
    local.layout()
    for remote in remotes:
        local.cut.check_equal(remote.cut)
        remote.layout()
    ranks, sizes = sorted(remote.rank for remote in remotes), {remote.tp for remote in remotes}
    if sizes != {len(remotes)}:
        raise ConfigError(f"tp of the peer is {sorted(sizes)}, but it shows {len(remotes)} ranks", field="tp")
    if ranks != list(range(len(remotes))):
        raise ConfigError(f"rank of the peer's arenas is {ranks}: each must be there once", field="rank")


def _runs(local: ArenaView, remote: ArenaView) -> tuple[list[ByteRun], list[ByteRun]]:
    """Return the local rank's runs of a block, and of a state slot, of the remote one."""
    if local.tp == remote.tp:
        return _whole(local, remote)

    def read(parts: Callable[[ModelLayout, int, int], list[RankUnits]]) -> list[ByteRun]:
        ours, theirs = (parts(view.cut, view.tp, view.rank) for view in (local, remote))
        return common_runs(ours, theirs, local.rank)

    return read(block_parts), read(state_parts)


def _whole(local: ArenaView, remote: ArenaView) -> tuple[list[ByteRun], list[ByteRun]]:
    """Return whole slots as one run, from the same rank if the rank counts are equal."""
    if local.rank != remote.rank:
        return [], []
    layout = local.cut.layout(local.tp)
    blocks, states = (
        [ByteRun(0, 0, size)] if size else [] for size in (layout.block_bytes, layout.state_bytes)
    )
    return blocks, states


def _rows(
    view: ArenaView, blocks: Sequence[ByteRun], states: Sequence[ByteRun], offset: Callable[[ByteRun], int]
) -> NDArray[np.int64]:
    """Return descriptor rows of these runs in every block, and in every state slot, of an arena."""
    layout = view.layout()
    slabs = view.num_bytes // layout.slab_bytes
    classes = (
        (blocks, layout.block_bytes, layout.block_bytes, slabs * layout.blocks_per_slab),
        (states, layout.state_bytes, layout.slab_bytes, slabs * layout.states_per_slab),
    )
    rows = []
    for runs, size, stride, count in classes:
        for run in runs:
            assert 0 <= offset(run) <= size - run.length, "a run lies within its slot"
            rows.append((view.base + offset(run), run.length, view.device, stride, count))
    if sum(row[-1] for row in rows) > MAX_DESCRIPTORS:
        raise ConfigError(
            f"num_bytes is {view.num_bytes}, too many slots to name: give less memory", field="num_bytes"
        )
    return np.array(rows, np.int64)
