"""What a request holds of the prefix cache, and what it begins with."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tree import Node


@dataclass(slots=True)
class Lease:
    """One request's lock on a cached prefix, from its admission to its end."""

    tenant: Tenant
    tip: Node
    """The node that it continues, as far as blocks can be shared."""
    shared: int
    """Blocks that it shares by reference: those that it will never write."""
    length: int
    """Cached tokens: its prefill starts behind them."""
    stops: tuple[int, ...]
    """Lengths at which prefill must end a chunk so that the state there can be kept; rising."""
    store: Tier
    found: Node
    """Node of `store` that holds the state at that length and the blocks to copy."""
    asked: int
    """Tokens of the prompt that was looked up."""
    guesses: tuple[int, ...] = ()
    """Lengths, rising, at which prefill ends a chunk because a later prompt may diverge there."""
    lent: bool = False
    own: int | None = None
    """Length from which on the request itself has extended the tree; None: it has not."""

    def stop_at(self, length: int) -> None:
        """Add a length at which a state is kept."""
        self.stops = tuple(sorted({*self.stops, length}))

    def until_stop(self, computed: int) -> int | None:
        """Count the tokens up to the next length at which a state is kept."""
        return min(
            (stop - computed for stop in (*self.stops, *self.guesses) if stop > computed), default=None
        )


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request starts with, all of it its own copy or shared by reference."""

    length: int
    blocks: Sequence[int]
    """Its first blocks: shared ones, which are reference-counted and read-only, then its own copies."""
    hidden_1D: Tensor | None
    fetched: bool
    """It came from the lower tier and is not cached in the upper one."""
