"""Locate a rank's units of each tensor, and the units that two ranks have in common.

A unit is what ranks divide: a KV head, a head of a state, a key head's channels of a convolution.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from specdec.state_slots.transfer.model_layout import ModelLayout, rank_units


class ByteRun(NamedTuple):
    """Bytes of a peer's slot, and their offset in our own."""

    theirs: int
    ours: int
    length: int


class RankUnits(NamedTuple):
    """A rank's units of one tensor: `length` bytes per unit in every row."""

    units: range
    offset: int
    step: int
    """Bytes from one unit to the next."""
    length: int
    rows: int = 1
    row_step: int = 0
    holders: int = 1
    """Ranks that hold each of these units; this one has index `copy` among them."""
    copy: int = 0

    def at(self, unit: int, row: int) -> int:
        return self.offset + row * self.row_step + (unit - self.units.start) * self.step


def block_parts(cut: ModelLayout, tp: int, rank: int) -> list[RankUnits]:
    """Return a rank's KV heads of each attention layer within a block."""
    parts = {}
    for region in cut.layout(tp).page_parts.regions:
        length = region.head_bytes // len(region.layers)
        for index, layer in enumerate(region.layers):
            heads = cut.kv[layer].heads
            parts[layer] = RankUnits(
                rank_units(heads, tp, rank),
                region.offset + index * length,
                step=region.head_bytes,
                length=length,
                holders=max(1, tp // heads),
                copy=rank % max(1, tp // heads),
            )
    return [parts[layer] for layer in range(len(cut.kv))]


def state_parts(cut: ModelLayout, tp: int, rank: int) -> list[RankUnits]:
    """Return a rank's heads of each state and channels of each projection, within a slot."""
    layout, parts = cut.layout(tp), []
    wide, item = layout.state_dtype.itemsize, layout.dtype.itemsize
    for full, local, at in zip(cut.states, layout.states, layout.state_parts.layers, strict=True):
        if full.heads == 1:
            columns, row = rank_units(full.value_dim, tp, rank), local.value_dim * wide
            parts.append(RankUnits(columns, at.state, wide, wide, rows=local.key_dim, row_step=row))
        elif full.heads:
            head = local.key_dim * local.value_dim * wide
            parts.append(RankUnits(rank_units(full.heads, tp, rank), at.state, head, head))
        offset = at.window
        for units, width in full.runs:
            channels, length = rank_units(units, tp, rank), width * local.conv_inputs * item
            parts.append(RankUnits(channels, offset, length, length))
            offset += len(channels) * length
    return parts


def common_runs(ours: Sequence[RankUnits], theirs: Sequence[RankUnits], rank: int) -> list[ByteRun]:
    """Return the runs that our rank reads from one of theirs; our ranks take turns among a unit's holders."""
    runs = [
        run
        for local, remote in zip(ours, theirs, strict=True)
        if remote.copy == rank % remote.holders
        for run in _overlap(local, remote)
    ]
    return _joined(sorted(runs, key=lambda run: run.ours))


def _overlap(ours: RankUnits, theirs: RankUnits) -> Iterator[ByteRun]:
    first, last = max(ours.units.start, theirs.units.start), min(ours.units.stop, theirs.units.stop)
    if first >= last or not ours.length:
        return
    is_dense = ours.step == theirs.step == ours.length
    count = last - first if is_dense else 1
    for row in range(ours.rows):
        for unit in range(first, last, count):
            yield ByteRun(theirs.at(unit, row), ours.at(unit, row), count * ours.length)


def _joined(runs: Iterable[ByteRun]) -> list[ByteRun]:
    """Join runs that are adjacent on both sides."""
    joined: list[ByteRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and (run.theirs, run.ours) == (last.theirs + last.length, last.ours + last.length):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return joined
