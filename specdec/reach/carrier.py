"""The carrier interface: reads bytes from a peer's arena into this one, over any transport."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.errors import SpecdecError

Indices = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Indices of descriptors to read, in pairs: of this arena, and of the peer's."""


class ReadLost(SpecdecError):
    """A read failed; the data are computed locally instead."""


class ReadLate(ReadLost):
    """A read missed its deadline: the peer is slow or stopped."""


class ReadDescriptors(Protocol):
    """Two lists of strided descriptors: rows of (address, length, device, stride, count).

    A row defines `count` descriptors; index 0 is the first descriptor of the first row.
    """

    @property
    def local(self) -> NDArray[np.int64]: ...

    @property
    def remote(self) -> NDArray[np.int64]: ...


def _running() -> "Future[Any]":
    """Return a future that cannot be cancelled, as an event loop would do along with the awaiting task."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True, eq=False)
class KVRead:
    """A read in flight.

    Its memory is valid once `done` has a result, and may be reused only once `over` has one: a lost or
    abandoned read may still write.
    """

    id: int
    done: "Future[float]" = field(default_factory=_running)
    """Its duration in seconds, or ReadLost."""
    released: "Future[None]" = field(default_factory=_running)
    """Set, never with an error, when it can write no more bytes."""


@dataclass(frozen=True, slots=True)
class CarrierFigures:
    """Statistics of a carrier since its start; the quarantine fields are current values."""

    reads: int = 0
    """Completed reads; the next two fields cover these."""
    bytes: int = 0
    seconds: float = 0.0
    """Summed over reads, which overlap."""
    lost: int = 0
    """Reads whose `done` raised, for any reason."""
    quarantined: int = 0
    quarantined_bytes: int = 0
    """Bytes that lost reads may still write to."""
    agents: int = 0
    """Number of times the agent was recreated to end a quarantine."""


class Carrier(Protocol):
    """Reads from peers' arenas. Thread-safe; its own thread does the work.

    `read` never raises in the caller's thread; errors are set on `KVRead.done`.
    """

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> bytes:
        """Metadata with which a peer reads from this arena. Changes when the agent is recreated."""
        ...

    @property
    def figures(self) -> CarrierFigures: ...

    def attach(self, peer: str, metadata: bytes, plan: ReadDescriptors) -> None:
        """Attach a peer, replacing any peer of this name. Raises ReadLost.

        A lost peer must be attached again with its current metadata.
        """
        ...

    def detach(self, peer: str) -> None:
        """Detach a peer and abandon reads from it. Unknown names are ignored."""
        ...

    def read(self, peer: str, indices: Indices, num_bytes: int, deadline_s: float) -> KVRead:
        """Start a read; after `deadline_s` seconds it is abandoned.

        `num_bytes` is the total length of the indices; a mismatch means that memory and plan disagree.
        """
        ...

    def give_up(self, read: KVRead) -> None:
        """Abandon a read: `done` raises unless it has a result; `over` is set once no more bytes arrive."""
        ...

    def close(self) -> None:
        """Abandon all reads and delete the agent, in bounded time. Later calls do nothing."""
        ...
