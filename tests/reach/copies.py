"""A carrier within a process: it copies from another arena, whose owner a test can stall or kill."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.reach.carrier_thread import CarrierThread, Quarantine
from specdec.reach.descriptors import PIECE_BYTES
from specdec.reach.wire import PeerLost, WireError
from specdec.state_slots.arena import Arena

Span = tuple[int, int]
"""Start address in an arena, and length in bytes."""


class Copies(CarrierThread):
    """A carrier that reads by plain copies. As a peer it can stall, resume or die."""

    def __init__(
        self, arena: Arena, *, quarantine: Quarantine | None = None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._memory = Memory(arena.data)
        super().__init__(
            "copies",
            partial(CopyingWire, self._memory),
            arena.data.nbytes,
            quarantine=quarantine,
            piece_bytes=piece_bytes,
        )

    @property
    def asked(self) -> int:
        """Count the pieces that others have begun to read from this arena."""
        return self._memory.asked

    def stall(self) -> None:
        """Stop reads from this arena; they complete when it resumes, however late."""
        self._memory.is_stalled = True

    def go_on(self) -> None:
        self._memory.is_stalled = False

    def die(self) -> None:
        """Disappear for others, also during reads."""
        self._memory.is_alive = False


class Memory:
    """An arena's bytes, and the simulated condition of their owner."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.is_stalled, self.is_alive = False, True
        self.asked = 0


class CopyingWire:
    """A wire that finds other wires of the process by their metadata."""

    _open: ClassVar["WeakValueDictionary[bytes, CopyingWire]"] = WeakValueDictionary()

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.metadata = uuid.uuid4().bytes
        self.is_open = True
        CopyingWire._open[self.metadata] = self

    def attach(self, metadata: bytes, local: NDArray[np.int64], remote: NDArray[np.int64]) -> "CopyingLink":
        """Connect to the other wire. Raises WireError."""
        there = CopyingWire._open.get(metadata)
        if there is None or not there.is_reachable:
            raise WireError("no arena of this process has that metadata")
        return CopyingLink(self, there, _spans(self.memory, local), _spans(there.memory, remote))

    @property
    def is_reachable(self) -> bool:
        return self.is_open and self.memory.is_alive

    def close(self) -> None:
        """Stop all copies from and to this arena."""
        self.is_open = False
        CopyingWire._open.pop(self.metadata, None)


class CopyingLink:
    def __init__(
        self, here: CopyingWire, there: CopyingWire, local: Sequence[Span], remote: Sequence[Span]
    ) -> None:
        self.here, self.there = here, there
        self._local, self._remote = local, remote
        self.is_open = True

    def post(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> "CopyingPiece":
        pairs = [(self._local[to], self._remote[source]) for to, source in zip(local, remote, strict=True)]
        self.there.memory.asked += 1
        return CopyingPiece(self, pairs)

    def close(self) -> None:
        self.is_open = False


class CopyingPiece:
    """Some spans, copied when polled: a test's peer may stall until then."""

    def __init__(self, link: CopyingLink, pairs: Sequence[tuple[Span, Span]]) -> None:
        self._link, self._pairs = link, pairs

    def is_done(self) -> bool:
        """Copy unless the peer is stalled; return whether it has copied. Raises PeerLost."""
        assert self._link.is_open, "a link was closed while pieces of it were on their way"
        here, there = self._link.here.memory, self._link.there
        if not there.is_reachable:
            raise PeerLost("its arena is gone")
        if there.memory.is_stalled:
            return False
        for (to, size), (source, _) in self._pairs:
            here.data[to : to + size].copy_(there.memory.data[source : source + size])
        if here.data.is_cuda:
            torch.cuda.synchronize(here.data.device)
        return True

    def release(self) -> None: ...


def _spans(memory: Memory, rows: NDArray[np.int64]) -> list[Span]:
    """List the spans of strided rows. Raises WireError if one is outside the arena."""
    base, end = memory.data.data_ptr(), memory.data.nbytes
    spans = [
        (address - base + place * stride, length)
        for address, length, _, stride, count in rows.tolist()
        for place in range(count)
    ]
    if any(start < 0 or start + length > end for start, length in spans):
        raise WireError("a row lies outside of the arena")
    return spans
