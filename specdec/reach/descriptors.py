"""Cut strided rows of descriptors to a bounded length, and lists of them to parts of a bounded cost."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from specdec.reach.carrier import Indices

PIECE_BYTES = 8 << 20
"""Over shared memory a read is copied within the call that begins it: some milliseconds of this much."""
DESCRIPTOR_BYTES = 16 << 10
"""What a descriptor costs beside its bytes, in bytes: those of 4 KiB take some 10 us each."""


class Descriptors:
    """Strided rows of which none is longer than a piece; indices stay those of the rows as given."""

    def __init__(self, rows: NDArray[np.int64], piece_bytes: int = PIECE_BYTES) -> None:
        self.piece_bytes = piece_bytes
        _, self._lengths, _, _, self._counts = rows.T
        self._parts = -(-self._lengths // piece_bytes)
        self._ends = np.cumsum(self._counts)
        cut_counts = self._counts * self._parts
        self._shift = np.cumsum(cut_counts) - cut_counts - (self._ends - self._counts)
        """What a row's indices grow by since rows before it are cut."""
        starts = _ranges(self._parts) * piece_bytes
        self.rows = np.repeat(rows, self._parts, axis=0)
        """Of each row all of its descriptors' first parts, then all of their second ones."""
        self.rows[:, 0] += starts
        self.rows[:, 1] = np.minimum(self.rows[:, 1] - starts, piece_bytes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def holds(self, indices: NDArray[np.int32]) -> bool:
        """Return whether every index is one of the rows as given."""
        return not len(indices) or bool(indices.min() >= 0 and indices.max() < len(self))

    def lengths(self, indices: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the bytes of each of these descriptors."""
        return np.take(self._lengths, self._rows_of(indices))

    def cut(self, indices: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Return the indices of the parts of these descriptors, in order, and the bytes of each part."""
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
    """Yield the parts of a read in order. The two of a pair are equally long."""
    (here, sizes), (there, _) = local.cut(indices[0]), remote.cut(indices[1])
    costs = sizes + DESCRIPTOR_BYTES
    bounds = np.flatnonzero(np.diff((np.cumsum(costs) - costs) // local.piece_bytes)) + 1
    starts, ends = (0, *bounds), (*bounds, len(sizes))
    for start, end in zip(starts, ends, strict=True):
        if start < end:
            yield here[start:end], there[start:end]


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, … up to each count, one after another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
