"""Simulate requests without a model: the real cache over an arena without bytes."""

from dataclasses import dataclass

import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.lease import PrefixLease
from specdec.state_slots.prefix.score import Score, Work
from specdec.state_slots.prefix.tree import Ids


@dataclass(slots=True)
class ReplayedRequest:
    """A request between its admission and its end."""

    number: int
    lease: PrefixLease
    table: list[int]
    state: int | None
    hit: int
    """Cached tokens of its prompt."""


class CacheReplay:
    """A cache and an arena on the `meta` device, used as a scheduler uses them.

    A request is admitted, prefilled at once, and ended; calls for several requests may interleave.
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

    def admit(self, prompt: Ids, output: int, tenant: Tenant = SOLE) -> ReplayedRequest | None:
        """Admit a request with `output` output tokens; None if its memory does not fit now."""
        arena, cache = self.arena, self.cache
        lease = cache.lease(prompt, tenant)
        blocks = arena.layout.blocks_for(len(prompt) + output)
        states = arena.layout.states_per_slab
        if not arena.can_take(blocks=blocks - lease.shared, states=states):
            cache.leave(lease)
            return None
        self._admitted += 1
        owner = self._admitted
        state = arena.take_state(owner) if states else None
        hit = cache.lend(owner, lease, state)
        new_blocks = arena.take_blocks(owner, blocks - len(hit.blocks))
        assert new_blocks is not None, "they were counted"
        return ReplayedRequest(owner, lease, [*hit.blocks, *new_blocks], state, hit.length)

    def read(self, live: ReplayedRequest, prompt: Ids) -> None:
        """Prefill a prompt: share its blocks, and cache the requested states on the way."""
        position = live.hit
        while position < len(prompt):
            count = min(self.chunk_tokens, len(prompt) - position)
            position += min(count, live.lease.tokens_to_next_state(position) or count)
            node = self.cache.note(live.lease, prompt[:position], live.table)
            self.cache.keep_chunk(live.lease, node, live.state, None)

    def end(self, live: ReplayedRequest, ids: Ids) -> None:
        """End a request: cache its state and all its tokens except the last one."""
        node = self.cache.note(live.lease, ids[:-1], live.table)
        if live.state is not None:
            self.cache.keep(node, live.number, live.state, None)
        self.arena.release_owner(live.number)
        self.cache.leave(live.lease)

    def serve(self, prompt: Ids, ids: Ids, tenant: Tenant = SOLE) -> int:
        """Serve a request alone; return its cached tokens."""
        live = self.admit(prompt, len(ids) - len(prompt), tenant)
        if live is None:
            return 0
        self.read(live, prompt)
        self.end(live, ids)
        return live.hit
