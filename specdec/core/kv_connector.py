"""The interface between the decode loop and whatever moves KV cache between engines."""

from collections.abc import Collection

from torch import Tensor

from specdec.core.request import Request
from specdec.state_slots.slots import Fixed


class KVConnector:
    """Moves no KV cache; a subclass that does overrides what it needs.

    The thread that owns the arena calls it. A request whose `is_prefill_only` is set prefills for another
    engine: `request_computed` is called as its blocks fill, `request_finished` with the state after them.
    """

    @property
    def owners(self) -> Collection[Fixed]:
        """List the transfers that hold memory of the arena, which other engines read or write."""
        return ()

    @property
    def is_receiving(self) -> bool:
        """Return whether other engines write into the arena, or wait for memory to write into."""
        return False

    @property
    def can_start(self) -> bool:
        """Return whether a transfer waits for a step to give it memory."""
        return False

    def advance(self) -> None:
        """Give memory to transfers that wait for it, if there is any."""

    def request_computed(self, request: Request) -> None:
        """Publish the full blocks of a request that is still prefilling."""

    def request_finished(self, request: Request, hidden_1D: Tensor | None) -> None:
        """Publish all of a prefill: its last block, its state, and what a draft head reads next."""

    def request_preempted(self, request: Request) -> None:
        """Withdraw what a request has published: its memory is reused, and computed anew."""

    def withdraw_all(self) -> None:
        """Withdraw everything published, even while it is read."""

    def reset(self) -> Collection[Fixed]:
        """Forget all transfers after a failed step; return the owners whose memory must stay taken."""
        return ()

    def close(self) -> None:
        """End all waiting."""
