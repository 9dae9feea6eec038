"""What a reader asks of the thing that moves bytes: copies within a process, or a NIXL agent.

One thread calls all of it.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class WireError(Exception):
    """An operation was refused before it moved a byte."""


class PeerLost(WireError):
    """The peer is gone: nothing that was begun over this link moves a byte any more."""


class Uncertain(WireError):
    """A piece failed, and its bytes may still arrive until the wire is closed."""


class Piece(Protocol):
    """A part of a read that is on its way."""

    def has_landed(self) -> bool:
        """Return whether all of it has arrived. Raises PeerLost or Uncertain."""
        ...

    def release(self) -> None:
        """Forget it, once it has landed or its peer is lost."""
        ...


class Link(Protocol):
    """A connection to a peer, with both lists of strided rows prepared."""

    def post(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> Piece:
        """Begin to read some descriptors, in pairs. Raises WireError, PeerLost or Uncertain."""
        ...

    def close(self) -> None:
        """Forget the peer, when none of its pieces is on its way or it is lost."""
        ...


class Wire(Protocol):
    """An agent of this arena: what is opened to reach others and be reached by them."""

    @property
    def metadata(self) -> bytes: ...

    def attach(self, metadata: bytes, local: NDArray[np.int64], remote: NDArray[np.int64]) -> Link:
        """Connect to a peer. Raises WireError."""
        ...

    def close(self) -> None:
        """Stop every byte of every link. Raises WireError if some may still come."""
        ...
