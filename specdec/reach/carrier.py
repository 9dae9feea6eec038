"""What moves bytes out of a peer's arena into this one's: the contract, whatever the wire is."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.errors import SpecdecError

Indices = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Descriptors to read, in pairs: those of this arena, those of the peer's."""


class ReadLost(SpecdecError):
    """A read brought nothing that may be used; what was wanted is computed instead."""


class ReadLate(ReadLost):
    """A read took longer than it may: its peer is slow, or stopped."""


class Rows(Protocol):
    """Two lists of strided descriptors: rows of (address, length, device, stride, count).

    A row stands for `count` descriptors; index 0 is the first one of the first row.
    """

    @property
    def local(self) -> NDArray[np.int64]: ...

    @property
    def remote(self) -> NDArray[np.int64]: ...


def _running() -> "Future[Any]":
    """Return a future that its holder cannot cancel: an event loop would, with the task that awaits it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Stand for bytes on their way.

    The memory may be read once `done` has a result, and may serve anything else only once `over` has:
    a read that is lost or given up still writes.
    """

    id: int
    done: "Future[float]" = field(default_factory=_running)
    """The seconds that it took, or ReadLost."""
    over: "Future[None]" = field(default_factory=_running)
    """Set, never an error, when no byte of it can be written any more."""


@dataclass(frozen=True, slots=True)
class CarrierFigures:
    """Count what a carrier did since it was made; the two of the quarantine say what is there now."""

    reads: int = 0
    """That landed; so do the next two."""
    bytes: int = 0
    seconds: float = 0.0
    """Summed over reads, which overlap."""
    lost: int = 0
    """Reads whose `done` raised, given up by whom it may be."""
    quarantined: int = 0
    quarantined_bytes: int = 0
    """Of memory that reads which are lost may still write to."""
    agents: int = 0
    """How often the agent was deleted and made anew, to end a quarantine."""


class Carrier(Protocol):
    """Read from peers' arenas. Any thread may call it; one of its own does the work.

    Nothing raises in the thread of a caller of `read`: what is wrong comes through `Read.done`.
    """

    @property
    def name(self) -> str: ...

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read from this arena. It changes when the agent is made anew."""
        ...

    @property
    def figures(self) -> CarrierFigures: ...

    def attach(self, peer: str, metadata: bytes, plan: Rows) -> None:
        """Be ready to read from a peer; what was attached by this name is detached. Raises ReadLost.

        A peer that is lost has to be attached again, with the metadata that it has by then.
        """
        ...

    def detach(self, peer: str) -> None:
        """Forget a peer, and give up what is being read from it. Knowing none of this name is no mistake."""
        ...

    def read(self, peer: str, indices: Indices, num_bytes: int, deadline_s: float) -> Read:
        """Begin to read; `deadline_s` seconds from now it is given up.

        `num_bytes` is what the indices come to: memory and plan are of two minds where it is not.
        """
        ...

    def give_up(self, read: Read) -> None:
        """End the wait for a read: `done` raises, unless it has a result; `over` takes the time it takes."""
        ...

    def close(self) -> None:
        """Give up all reads and delete the agent, in bounded time. No call begins anything afterwards."""
        ...
