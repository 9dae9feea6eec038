"""Requests served without a model: the cache as it is, over an arena that has books and no bytes."""

from dataclasses import dataclass

import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.lease import Lease
from specdec.state_slots.prefix.score import Score, Work
from specdec.state_slots.prefix.tree import Ids


@dataclass(slots=True)
class Live:
    """A request between its admission and its end."""

    number: int
    lease: Lease
    table: list[int]
    state: int | None
    hit: int
    """Tokens of its prompt that it need not read."""


class Replay:
    """Owns a cache and an arena on the `meta` device, and asks of them what a scheduler asks.

    A request is admitted, prefilled at once, and ends; between its steps others may take theirs.
    """

    def __init__(
        self,
        layout: Layout,
        num_bytes: int,
        work: Work,
        *,
        alpha: float = 0.0,
        has_head: bool = False,
        chunk_tokens: int = 512,
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.arena = Arena(layout, num_bytes, torch.device("meta"))
        self.score = Score(layout, work, alpha)
        self.cache = PrefixCache(self.arena, self.score, has_head=has_head)
        self._admitted = 0

    def admit(self, prompt: Ids, output: int, tenant: Tenant = SOLE) -> Live | None:
        """Begin a request that will write `output` tokens; None: there is no memory for all of it now."""
        arena, cache = self.arena, self.cache
        lease = cache.lease(prompt, tenant)
        blocks = arena.layout.blocks_for(len(prompt) + output)
        states = arena.layout.states_per_slab
        if not arena.can_take(blocks=blocks - lease.shared, states=states):
            cache.leave(lease)
            return None
        self._admitted += 1
        number = self._admitted
        state = arena.take_state(number) if states else None
        hit = cache.lend(number, lease, state)
        own = arena.take_blocks(number, blocks - len(hit.blocks))
        assert own is not None, "they were counted"
        return Live(number, lease, [*hit.blocks, *own], state, hit.length)

    def read(self, live: Live, prompt: Ids) -> None:
        """Share what was read of a prompt, and keep the states that are wanted on the way."""
        at = live.hit
        while at < len(prompt):
            count = min(self.chunk_tokens, len(prompt) - at)
            at += min(count, live.lease.until_stop(at) or count)
            node = self.cache.note(live.lease, prompt[:at], live.table)
            self.cache.keep_chunk(live.lease, node, live.state, None)

    def end(self, live: Live, whole: Ids) -> None:
        """Keep what a request has read, all but the token that it chose last, and its state."""
        node = self.cache.note(live.lease, whole[:-1], live.table)
        if live.state is not None:
            self.cache.keep(node, live.number, live.state, None)
        self.arena.release_owner(live.number)
        self.cache.leave(live.lease)

    def serve(self, prompt: Ids, whole: Ids, tenant: Tenant = SOLE) -> int:
        """Serve a request alone; return the tokens that it need not compute."""
        live = self.admit(prompt, len(whole) - len(prompt), tenant)
        if live is None:
            return 0
        self.read(live, prompt)
        self.end(live, whole)
        return live.hit
