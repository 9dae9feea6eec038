"""Split strided rows of descriptors to a maximum length, and lists of them to a maximum cost."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from specdec.reach.carrier import Indices

PIECE_BYTES = 8 << 20
"""Over shared memory a read is copied within the call that posts it; this much takes a few milliseconds."""
DESCRIPTOR_BYTES = 16 << 10
"""Cost of a descriptor in bytes, added to its length: descriptors of 4 KiB take some 10 us each."""


class Descriptors:
    """Strided rows split to at most `piece_bytes`; indices still refer to the original rows."""

    def __init__(self, rows: NDArray[np.int64], piece_bytes: int = PIECE_BYTES) -> None:
        self.piece_bytes = piece_bytes
        _, self._lengths, _, _, self._counts = rows.T
        self._parts = -(-self._lengths // piece_bytes)
        self._ends = np.cumsum(self._counts)
        cut_counts = self._counts * self._parts
        self._shift = np.cumsum(cut_counts) - cut_counts - (self._ends - self._counts)
        """Index offset of each row, caused by the splitting of earlier rows."""
        starts = _ranges(self._parts) * piece_bytes
        self.rows = np.repeat(rows, self._parts, axis=0)
        """Per row: first the first parts of all its descriptors, then their second parts, and so on."""
        self.rows[:, 0] += starts
        self.rows[:, 1] = np.minimum(self.rows[:, 1] - starts, piece_bytes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def holds(self, indices: NDArray[np.int32]) -> bool:
        """Return whether every index is valid in the original rows."""
        return not len(indices) or bool(indices.min() >= 0 and indices.max() < len(self))

    def lengths(self, indices: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the bytes of each descriptor."""
        return np.take(self._lengths, self._rows_of(indices))

    def cut(self, indices: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the part indices of these descriptors, in order, and the bytes of each part."""
        row = self._rows_of(indices)
        parts = self._parts[row]
        part = _ranges(parts)
        first = np.repeat(indices + self._shift[row], parts)
        sizes = np.repeat(self._lengths[row], parts) - part * self.piece_bytes
        cut = first + part * np.repeat(self._counts[row], parts)
        return cut.astype(np.int32), np.minimum(sizes, self.piece_bytes)

    def _rows_of(self, indices: NDArray[np.int32]) -> NDArray[np.intp]:
        return np.searchsorted(self._ends, indices, side="right")


def pieces(local: Descriptors, remote: Descriptors, indices: Indices) -> Iterator[Indices]:
    """Yield a read's parts in order; both sides of a pair have equal length."""
    (local_ids, sizes), (remote_ids, _) = local.cut(indices[0]), remote.cut(indices[1])
    costs = sizes + DESCRIPTOR_BYTES
    bounds = np.flatnonzero(np.diff((np.cumsum(costs) - costs) // local.piece_bytes)) + 1
    starts, ends = (0, *bounds), (*bounds, len(sizes))
    for start, end in zip(starts, ends, strict=True):
        if start < end:
            yield local_ids[start:end], remote_ids[start:end]


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenation of `range(count)` for each count."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
