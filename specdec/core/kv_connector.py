"""The interface between the decode loop and whatever moves KV cache between engines."""

from collections.abc import Collection

from torch import Tensor

from specdec.core.request import Request
from specdec.state_slots.slots import FixedOwner


class KVConnector:
    """KV transfer interface. The base transfers nothing; subclasses override what they need.

    Called by the thread that owns the arena. A request whose `is_prefill_only` is set prefills for another
    engine: `request_computed` is called as its blocks fill, `request_finished` with the final state.
    """

    @property
    def owners(self) -> Collection[FixedOwner]:
        """Transfers that hold arena memory which other engines read or write."""
        return ()

    @property
    def is_receiving(self) -> bool:
        """Whether other engines write into the arena, or wait for memory to write into."""
        return False

    @property
    def can_start(self) -> bool:
        """Whether a transfer waits for memory, which a step may give it."""
        return False

    def advance(self) -> None:
        """Allocate memory for waiting transfers, if available."""

    def request_computed(self, request: Request) -> None:
        """Publish the full blocks of a request that is still prefilling."""

    def request_finished(self, request: Request, hidden_1D: Tensor | None) -> None:
        """Publish a finished prefill: its last block, its state, and the head's next input."""

    def request_preempted(self, request: Request) -> None:
        """Withdraw a request's published blocks: its memory is reused, and it is computed again."""

    def withdraw_all(self) -> None:
        """Withdraw everything published, even while another engine reads it."""

    def reset(self) -> Collection[FixedOwner]:
        """Drop all transfers after a failed step; return owners whose memory must stay allocated."""
        return ()

    def close(self) -> None:
        """Cancel all waiting transfers."""
