"""A step's input: packed tokens, in groups of rows with windows of equal width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.kernels.group import Group, RecordIds
from specdec.kernels.tree.row import ancestor_masks, taps
from specdec.state_slots.tree import TokenTree

RecordSlot = tuple[int, int]
"""Slab and index of one record."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step.

    `path` lists the accepted records not yet folded into its state. If nodes may be rejected, each has one of
    `records`, or its own state slot among `snapshots`; if every token is certain, neither.
    """

    tree: TokenTree
    length: int
    table_N: Tensor
    state: int
    path: Sequence[RecordSlot] = ()
    records: Sequence[RecordSlot] | None = None
    snapshots: Sequence[int] | None = None
    skipped: int = 0
    """Tokens counted in `length` before the first block of `table_N`: no attention layer reads them."""

    def __post_init__(self) -> None:
        for slots in (self.records, self.snapshots):
            assert slots is None or len(slots) == len(self.tree), "every node needs a slot"

    def with_outputs(
        self, records: Sequence[RecordSlot] | None = None, snapshots: Sequence[int] | None = None
    ) -> "Row":
        """Return a copy of the row whose nodes write these slots."""
        # Called for each row of a step: `dataclasses.replace` takes several times as long.
        same = self.tree, self.length, self.table_N, self.state, self.path
        return Row(*same, records, snapshots, self.skipped)


@dataclass(frozen=True, slots=True)
class Window:
    token_T: Tensor
    position_T: Tensor
    groups: tuple[Group, ...]
    first_B: tuple[int, ...]
    """Packed index of each row's root, in the rows' original order."""


def build_window(rows: Sequence[Row], conv_width: int, device: torch.device) -> Window:
    """Pack rows so that every group, of rows of one width and kind, is contiguous."""

    def shape(i: int) -> tuple[int, bool, bool]:
        row = rows[i]
        return len(row.tree), row.records is not None, row.snapshots is not None

    order = sorted(range(len(rows)), key=lambda i: (*shape(i), rows[i].state))
    first = [0] * len(rows)
    tokens: list[int] = []
    positions: list[int] = []
    groups: list[Group] = []
    members: list[Row] = []
    for rank, i in enumerate(order):
        row = rows[i]
        first[i] = len(tokens)
        tokens += row.tree.tokens
        positions += [row.skipped + row.length + depth for depth in row.tree.depths]
        members.append(row)
        if rank + 1 == len(order) or shape(order[rank + 1]) != shape(i):
            start = len(tokens) - len(members) * len(row.tree)
            groups.append(_group(members, start, conv_width, device))
            members = []
    return Window(_ids(tokens, device), _ids(positions, device), tuple(groups), tuple(first))


def record_ids(paths: Sequence[Sequence[RecordSlot]], device: torch.device) -> tuple[RecordIds, Tensor]:
    """Return the records of each row's path, padded to the longest, and their counts."""
    return _records(paths, device), _ids([len(path) for path in paths], device)


def _group(rows: Sequence[Row], start: int, conv_width: int, device: torch.device) -> Group:
    trees = [row.tree for row in rows]
    chains = all(tree.is_chain for tree in trees)
    lengths = [row.length for row in rows]
    has_path = any(row.path for row in rows)
    has_records, has_snapshots = rows[0].records is not None, rows[0].snapshots is not None
    return Group(
        start=start,
        rows=len(rows),
        width=len(trees[0]),
        state_B=_ids([row.state for row in rows], device),
        path=_records([row.path for row in rows], device) if has_path else None,
        path_length_B=_ids([len(row.path) for row in rows], device) if has_path else None,
        record=_records([row.records or () for row in rows], device) if has_records else None,
        snapshot_BM=_ids([row.snapshots for row in rows], device) if has_snapshots else None,
        ancestors_BMM=None if chains else _ancestors(trees, device),
        tap_BMC=None if chains else _ids([taps(tree.parents, conv_width) for tree in trees], device),
        table_BN=_tables([row.table_N for row in rows]).to(device),
        length_B=_ids(lengths, device),
        max_length=max(lengths),
    )


def _tables(tables: Sequence[Tensor]) -> Tensor:
    """Stack rows of block ids, padding shorter ones."""
    if len(tables) == 1:
        return tables[0][None]
    same_size = len(set(map(Tensor.numel, tables))) == 1
    return torch.stack(list(tables)) if same_size else pad_sequence(list(tables), batch_first=True)


def _ids(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _padded(lists: Sequence[Sequence[Any]], fill: Any) -> list[list[Any]]:
    longest = max(map(len, lists))
    return [[*values, *[fill] * (longest - len(values))] for values in lists]


def _records(slots: Sequence[Sequence[RecordSlot]], device: torch.device) -> RecordIds:
    padded = _padded(slots, (0, 0))
    slabs = _ids([[slab for slab, _ in row] for row in padded], device)
    return RecordIds(slabs, _ids([[index for _, index in row] for row in padded], device))


def _ancestors(trees: Sequence[TokenTree], device: torch.device) -> Tensor:
    """Unpack the trees' masks, eight bytes each, into booleans."""
    packed = b"".join(mask.to_bytes(8, "little") for tree in trees for mask in ancestor_masks(tree.parents))
    bytes_BM8 = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(trees), -1, 8)
    bits_BM88 = bytes_BM8[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits_BM88.flatten(2)[..., : len(trees[0])].bool().to(device)
