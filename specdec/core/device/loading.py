"""Copy request data to the device rows without waiting for running steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core.device.extent import Extent
from specdec.core.device.rows import BatchRows
from specdec.core.request import Request
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot


class RowSlots:
    """Slots of one request in a batch."""

    def __init__(
        self, request: Request, sets: tuple[Sequence[RecordSlot], ...], snapshots: Sequence[int]
    ) -> None:
        self.request, self.sets, self.snapshots = request, sets, list(snapshots)
        self.before = request.committed
        """Committed state at loading; its path's records are released at the end."""
        self.blocks = 0
        """Number of blocks the device table already has."""
        self.gone = False
        """Whether its row has become padding."""


def fill(x_B: Tensor, values: Sequence[Any]) -> None:
    """Copy values to the first rows of a tensor."""
    x_B[: len(values)].copy_(_staged(values, x_B.dtype, x_B.device), non_blocking=True)


def ids(values: Sequence[Any], device: torch.device) -> Tensor:
    """Return a device tensor of integers."""
    return _staged(values, torch.int64, device).to(device, non_blocking=True)


def load(rows: BatchRows, extent: Extent, held: Sequence[RowSlots]) -> None:
    """Load every request into its row."""
    requests = [slots.request for slots in held]
    committed = [r.committed or CommittedState(0) for r in requests]
    fill(rows.length_B, [r.num_computed_tokens for r in requests])
    fill(rows.token_BM[:, 0], [r.tokens[-1] for r in requests])
    fill(rows.seed_B, [r.chooser.seed for r in requests])
    numbers = zip(*(r.chooser.rule for r in requests), strict=True)
    for column_B, values in zip(rows.rule_B, numbers, strict=True):
        fill(column_B, values)
    fill(rows.state_B, [c.state for c in committed])
    fill(rows.path_length_B, [len(c.path) for c in committed])
    unused = [(0, 0)] * extent.nodes
    paths = [[*c.path, *unused[: extent.path - len(c.path)]] for c in committed]
    for i, path_BP in enumerate((rows.path_slab_BP, rows.path_index_BP)):
        fill(path_BP, [[slot[i] for slot in path] for path in paths])
    if any(slots.sets for slots in held):
        sets = [slots.sets or (unused, unused) for slots in held]
        for i, set_B2M in enumerate((rows.slab_B2M, rows.place_B2M)):
            fill(set_B2M, [[[slot[i] for slot in part] for part in slots] for slots in sets])
    if any(slots.snapshots for slots in held):
        fill(rows.snapshot_BM, [slots.snapshots or [0] * extent.nodes for slots in held])


def load_blocks(rows: BatchRows, held: Sequence[RowSlots]) -> None:
    """Append new blocks to the device's block tables."""
    width = rows.table_BN.shape[1]
    indices: list[int] = []
    blocks: list[int] = []
    for b, slots in enumerate(held):
        if not slots.gone and len(slots.request.table_N) > slots.blocks:
            table = slots.request.table_N[slots.blocks :].tolist()
            indices += range(b * width + slots.blocks, b * width + slots.blocks + len(table))
            blocks += table
            slots.blocks += len(table)
    if indices:
        device = rows.table_BN.device
        rows.table_BN.view(-1).index_copy_(0, ids(indices, device), ids(blocks, device))


def load_trees(rows: BatchRows, trees: Sequence[TokenTree | None], nodes: int) -> None:
    """Write trees to the next windows, padded with chains of `NO_TOKEN`; rows without a tree keep theirs."""
    drafted = [(b, tree) for b, tree in enumerate(trees) if tree]
    tokens = [[*t.tokens, *[NO_TOKEN] * (nodes - len(t))] for _, t in drafted]
    parents = [[*t.parents, *range(len(t) - 1, nodes - 1)] for _, t in drafted]
    row_R = ids([b for b, _ in drafted], rows.token_BM.device)
    for to_BM, values in ((rows.token_BM, tokens), (rows.parent_BM, parents)):
        to_BM[:, :nodes].index_copy_(0, row_R, ids(values, to_BM.device))
    for score_BM in (rows.score_BM, rows.belief_BM):  # these belong to the drafted windows
        score_BM.index_fill_(0, row_R, 0.0)


def _staged(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a host tensor, pinned if the target is a GPU, so that copies are asynchronous."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
