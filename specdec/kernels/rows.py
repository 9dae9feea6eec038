"""Index a group's slots and records in the arena's views with few copies."""

import torch
from torch import Tensor

from specdec.kernels.group import RecordIds

Index = slice | Tensor
RecordIndex = tuple[int | Tensor, Index]


def on_host(ids: Tensor) -> bool:
    """Return whether reading ids is cheap: on any device but the CPU it waits for the queue."""
    return ids.device.type == "cpu"


def locate_slots(slot_B: Tensor) -> Index:
    """Return the index into S: a slice, which needs no copy, if the slots are consecutive."""
    if not on_host(slot_B):
        return slot_B
    slots = slot_B.tolist()
    first, after = slots[0], slots[0] + len(slots)
    return slice(first, after) if slots == list(range(first, after)) else slot_B


def locate_records(ids: RecordIds) -> RecordIndex:
    """Return the index into S and R that gives the records as packed tokens [B * N, ...].

    Consecutive records of a single row become a slice.
    """
    slab_BN, index_BN = ids
    if on_host(slab_BN) and len(slab_BN) == 1 and slab_BN.shape[1]:
        (slabs,), (indices,) = slab_BN.tolist(), index_BN.tolist()
        first, after = indices[0], indices[0] + len(indices)
        if indices == list(range(first, after)) and slabs.count(slabs[0]) == len(slabs):
            return slabs[0], slice(first, after)
    return slab_BN.flatten(), index_BN.flatten()


def write(view: Tensor, at: Index | RecordIndex, value: Tensor) -> None:
    """Store `value` in a view of the arena, in the view's own dtype."""
    view[at] = cast(value, view.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the dtype if it differs; a no-op `to` costs as much as a small operation."""
    return x if x.dtype == dtype else x.to(dtype)


def find_parents(ancestors_BMM: Tensor) -> Tensor:
    """Return each node's source state: 0 for the row's own, or i + 1 for the one after node i.

    Nodes are in topological order, so the parent is the last ancestor.
    """
    number_M = torch.arange(1, ancestors_BMM.shape[2] + 1, device=ancestors_BMM.device)
    return (ancestors_BMM.tril(-1) * number_M).amax(-1)


def trim_path(path: RecordIds, length_B: Tensor) -> tuple[RecordIds, Tensor | None]:
    """Trim the path to the longest row; return it and its padding mask [B, N], None without padding.

    Padding refers to arbitrary records: values read through it are undefined and may be NaN.
    """
    if on_host(length_B):
        lengths = length_B.tolist()
        longest = max(lengths)
        if longest < path.slab_BN.shape[1]:
            path = RecordIds(path.slab_BN[:, :longest], path.index_BN[:, :longest])
        if min(lengths) == longest:
            return path, None
    place_N = torch.arange(path.slab_BN.shape[1], device=length_B.device)
    return path, place_N >= length_B[:, None]
