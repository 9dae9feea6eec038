"""A request's hold on the prefix cache, and its initial memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tree import PrefixNode


@dataclass(slots=True)
class PrefixLease:
    """One request's lock on a cached prefix, from its admission to its end."""

    tenant: Tenant
    node: PrefixNode
    """The node that it continues, as far as blocks can be shared."""
    shared: int
    """Blocks that it shares by reference and never writes."""
    length: int
    """Cached tokens: its prefill starts after them."""
    state_lengths: tuple[int, ...]
    """Ascending lengths at which prefill must end a chunk so that the state can be cached."""
    store: Tier
    found: PrefixNode
    """Node of `store` with the state at that length and the blocks to copy."""
    asked: int
    """Tokens of the prompt that was looked up."""
    guesses: tuple[int, ...] = ()
    """Ascending lengths at which prefill ends a chunk because a later prompt may diverge there."""
    lent: bool = False
    extended_from: int | None = None
    """Length from which the request itself has extended the tree; None: it has not."""

    def add_state_length(self, length: int) -> None:
        """Add a length at which to cache a state."""
        self.state_lengths = tuple(sorted({*self.state_lengths, length}))

    def tokens_to_next_state(self, computed: int) -> int | None:
        """Return the tokens up to the next length with a state to cache."""
        return min(
            (end - computed for end in (*self.state_lengths, *self.guesses) if end > computed),
            default=None,
        )


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A request's initial memory, all copied or shared by reference."""

    length: int
    blocks: Sequence[int]
    """Its first blocks: shared, reference-counted, read-only ones, then its own copies."""
    hidden_1D: Tensor | None
    fetched: bool
    """It came from the lower tier and is not cached in the upper one."""
