"""The wire interface below a reader: in-process copies, or a NIXL agent.

One thread makes all calls.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class WireError(Exception):
    """An operation was refused before any transfer."""


class PeerLost(WireError):
    """The peer is lost: transfers posted over this link no longer write."""


class TransferUncertain(WireError):
    """A piece failed, and its bytes may still arrive until the wire is closed."""


class WireTransfer(Protocol):
    """A part of a read in flight."""

    def is_done(self) -> bool:
        """Return whether all of it has arrived. Raises PeerLost or Uncertain."""
        ...

    def release(self) -> None:
        """Release it, once it has landed or its peer is lost."""
        ...


class WireLink(Protocol):
    """A connection to a peer, with both lists of strided rows prepared."""

    def post(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> WireTransfer:
        """Start reading descriptors, in pairs. Raises WireError, PeerLost or Uncertain."""
        ...

    def close(self) -> None:
        """Close the link, when none of its pieces is in flight or the peer is lost."""
        ...


class Wire(Protocol):
    """An agent of this arena, which reads from others and serves them."""

    @property
    def metadata(self) -> bytes: ...

    def attach(self, metadata: bytes, local: NDArray[np.int64], remote: NDArray[np.int64]) -> WireLink:
        """Connect to a peer. Raises WireError."""
        ...

    def close(self) -> None:
        """Stop all transfers of all links. Raises WireError if some may still write."""
        ...
