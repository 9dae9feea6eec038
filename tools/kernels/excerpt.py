"""Cut a few rows and their part of the arena out of a step, small enough for the reference."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory


def tokens_of(group: Group, rows: Sequence[int]) -> list[int]:
    """Return the packed tokens of some rows of a lone group."""
    return [row * group.width + node for row in rows for node in range(group.width)]


def excerpt_group(group: Group, rows: Sequence[int]) -> Group:
    """Return the group of some rows, on the host; its ids still refer to the whole arena."""

    def pick(x_B: Tensor | None) -> Tensor | None:
        return None if x_B is None else x_B[list(rows)].cpu()

    def records(ids: RecordIds | None) -> RecordIds | None:
        return None if ids is None else RecordIds(*(x_BN[list(rows)].cpu() for x_BN in ids))

    return replace(
        group,
        rows=len(rows),
        state_B=group.state_B[list(rows)].cpu(),
        path=records(group.path),
        path_length_B=pick(group.path_length_B),
        record=records(group.record),
        snapshot_BM=pick(group.snapshot_BM),
        ancestors_BMM=pick(group.ancestors_BMM),
        tap_BMC=pick(group.tap_BMC),
        table_BN=group.table_BN[list(rows)].cpu(),
        length_B=group.length_B[list(rows)].cpu(),
    )


def excerpt(memory: RecurrentMemory, group: Group, rows: Sequence[int]) -> tuple[RecurrentMemory, Group]:
    """Copy the rows' states and records to their own memory on the host, and remap their ids.

    Slot b is row b's state, followed by the snapshots row by row; slab b holds its path, then its records.
    """
    own = excerpt_group(group, rows)
    count = len(rows)
    state_S, slots = own.state_B, torch.arange(count)
    snapshot_BM = None
    if own.snapshot_BM is not None:
        state_S = torch.cat([state_S, own.snapshot_BM.flatten()])
        snapshot_BM = count + torch.arange(own.snapshot_BM.numel()).view(own.snapshot_BM.shape)
    kept = [ids for ids in (own.path, own.record) if ids is not None]

    def states(view_S: Tensor) -> Tensor:
        return view_S[state_S.to(view_S.device)].cpu()

    def records(view_SR: Tensor) -> Tensor:
        if not kept:
            return torch.zeros(count, 1, *view_SR.shape[2:], dtype=view_SR.dtype)
        at = (torch.cat(parts, dim=1).to(view_SR.device) for parts in zip(*kept, strict=True))
        return view_SR[tuple(at)].cpu()

    copied = RecurrentMemory(
        states(memory.state_SHKW),
        states(memory.window_SIC),
        records(memory.update_SRHW),
        records(memory.decay_SRH),
        records(memory.input_SRC),
    )
    first = own.path.slab_BN.shape[1] if own.path else 0
    renamed = replace(
        own,
        start=0,
        state_B=slots,
        path=_side_by_side(own.path, 0),
        record=_side_by_side(own.record, first),
        snapshot_BM=snapshot_BM,
    )
    return copied, renamed


def excerpt_pages(pages_NPXJD: Tensor, group: Group, rows: Sequence[int]) -> tuple[Tensor, Group]:
    """Copy the rows' KV blocks to their own pages on the host."""
    own = excerpt_group(group, rows)
    block_N = own.table_BN.flatten()
    table_BN = torch.arange(len(block_N)).view(own.table_BN.shape)
    return pages_NPXJD[block_N.to(pages_NPXJD.device)].cpu(), replace(own, start=0, table_BN=table_BN)


def _side_by_side(ids: RecordIds | None, first: int) -> RecordIds | None:
    if ids is None:
        return None
    rows, count = ids.slab_BN.shape
    slab_BN = torch.arange(rows)[:, None].expand(rows, count).contiguous()
    return RecordIds(slab_BN, (first + torch.arange(count)).expand(rows, count).contiguous())
