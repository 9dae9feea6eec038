"""Commands of rank 0 to the other ranks: an operation and 64-bit integers."""

from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain

import torch

from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot, Row


class Operation(IntEnum):
    FORWARD = 0
    PROJECT = 1
    MOVE = 2
    FOLD = 3
    ZERO_STATE = 4
    COPY = 5
    GIVE_BACK = 6
    END = 7


NO_SLOTS, RECORDS, SNAPSHOTS = range(3)
"""What the nodes of a row write."""


def packed(operation: Operation, values: Sequence[int]) -> bytes:
    """Return a command as bytes, in the machine's byte order: all ranks run on one machine."""
    return array("q", (operation, *values)).tobytes()


def unpacked(command: bytes) -> tuple[Operation, list[int]]:
    """Return a command's operation and integers."""
    values = array("q", command).tolist()
    return Operation(values[0]), values[1:]


def pack_rows(rows: Sequence[Row]) -> list[int]:
    """Return the rows of a step as integers."""
    values: list[int] = []
    for row in rows:
        kind, slots = NO_SLOTS, list[int]()
        if row.records is not None:
            kind, slots = RECORDS, _flat(row.records)
        elif row.snapshots is not None:
            kind, slots = SNAPSHOTS, list(row.snapshots)
        values += [row.length, row.state, row.skipped, kind]
        for part in (row.tree.tokens, row.tree.parents, row.table_N.tolist(), _flat(row.path), slots):
            values += [len(part), *part]
    return values


def unpack_rows(values: Sequence[int]) -> list[Row]:
    """Return the rows of `pack_rows`."""
    reader, rows = Reader(values), []
    while not reader.is_done:
        length, state, skipped, kind = reader.take(4)
        tokens, parents, table, path, slots = (reader.take(reader.take(1)[0]) for _ in range(5))
        rows.append(
            Row(
                TokenTree(tuple(tokens), tuple(parents)),
                length,
                torch.tensor(table, dtype=torch.int64),
                state,
                _paired(path),
                _paired(slots) if kind == RECORDS else None,
                slots if kind == SNAPSHOTS else None,
                skipped,
            )
        )
    return rows


def pack_committed(committed: Sequence[CommittedState]) -> list[int]:
    """Return states and the records to fold into them as integers."""
    parts = ((item.state, len(item.path), *_flat(item.path)) for item in committed)
    return list(chain.from_iterable(parts))


def unpack_committed(values: Sequence[int]) -> list[CommittedState]:
    """Return the states of `pack_committed`."""
    reader, committed = Reader(values), []
    while not reader.is_done:
        state, count = reader.take(2)
        committed.append(CommittedState(state, tuple(_paired(reader.take(2 * count)))))
    return committed


class Reader:
    """Reads integers in order."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self._at = values, 0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._values)

    def take(self, count: int) -> Sequence[int]:
        """Return the next integers."""
        self._at += count
        assert self._at <= len(self._values), "a command is cut short"
        return self._values[self._at - count : self._at]


def _flat(records: Sequence[RecordSlot]) -> list[int]:
    return list(chain.from_iterable(records))


def _paired(values: Sequence[int]) -> list[RecordSlot]:
    iterator: Iterator[int] = iter(values)
    return list(zip(iterator, iterator, strict=True))
