"""Fetches from other engines: memory for a prefix, which becomes a cached prefix."""

import time
from collections.abc import Collection, Sequence, Sized
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.pinned import sent
from specdec.state_slots.prefix.cache import PrefixCache, as_ids
from specdec.state_slots.prefix.rates import TierRates, mark
from specdec.state_slots.prefix.tree import Ids
from specdec.state_slots.slots import FixedOwner

WORTH_FETCHING = 64
"""Minimum tokens to fetch; fewer are computed as quickly."""


class IncomingPrefix(FixedOwner):
    """A prefix being fetched.

    External writers of its blocks and state must have finished before it is landed or dropped.
    """

    def __init__(self, tenant: Tenant, ids: Ids, shared: Sequence[int], num_cached: int) -> None:
        self.tenant, self.ids = tenant, ids
        self.shared, self.num_cached = tuple(shared), num_cached
        """Blocks already cached, and their number of tokens."""
        self.blocks: tuple[int, ...] = ()
        """Blocks to be fetched."""
        self.state: int | None = None
        """State slot with undefined content; None for a model without states."""
        self.is_void = False
        """Whether the arena was reset since: it can only be dropped."""
        self._clear = mark()

    def equip(self, arena: Arena) -> None:
        """Allocate its memory, whose availability was checked."""
        blocks = arena.take_blocks(self, arena.layout.blocks_for(len(self.ids)) - len(self.shared))
        # Not `take_state`, whose zero fill might run after external writes.
        states = arena.take_snapshots(self, arena.layout.states_per_slab)
        assert blocks is not None and states is not None
        self.blocks, self.state = tuple(blocks), next(iter(states), None)
        self._clear = mark(arena)

    @property
    def is_clear(self) -> bool:
        """Whether the device has finished earlier operations on its memory."""
        return self._clear.passed()


class SchedulerLoad(Protocol):
    """The scheduler's load, for deciding when to fetch."""

    @property
    def max_running(self) -> int: ...

    @property
    def running(self) -> Sized: ...

    @property
    def waiting(self) -> Sized: ...

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """Return a tenant's scheduling key; the smallest is served first."""
        ...

    def comes_before_waiting(self, tenant: Tenant, arrived_s: float) -> bool:
        """Return whether a request of this tenant would be admitted before all waiting ones."""
        ...


class WaitingPrefix(NamedTuple):
    """A prefix waiting for memory."""

    tenant: Tenant
    ids: Ids
    future: "Future[IncomingPrefix | None]"
    arrived_s: float


class IncomingPrefixes:
    """Prefixes being fetched or waiting for memory; belongs to the thread that owns the arena."""

    def __init__(self, arena: Arena, cache: PrefixCache, requests: SchedulerLoad) -> None:
        self.arena, self.cache, self.requests = arena, cache, requests
        self.live: set[IncomingPrefix] = set()
        self.rates = TierRates()
        """Fetch speed; the prefill speed is measured by the cache."""
        self.waiting: list[WaitingPrefix] = []
        self.is_closed = False

    def begin(self, tenant: Tenant, ids: Sequence[int], future: "Future[IncomingPrefix | None]") -> None:
        """Allocate memory for a prefix when available; None: not worth fetching.

        Until then the future can be cancelled.
        """
        self.waiting.append(WaitingPrefix(tenant, as_ids(ids), future, time.perf_counter()))
        if self.is_closed:
            self.close()
        else:
            self.advance()

    def advance(self) -> None:
        """Allocate memory for waiting prefixes, in order."""
        while self.waiting:
            head = min(self.waiting, key=lambda entry: (self.requests.rank(entry.tenant), entry.arrived_s))
            tenant, ids, future, arrived_s = head
            landing = None
            if not future.cancelled() and self._is_worth(tenant, ids):
                landing = self._equipped(tenant, ids) if self._is_next(tenant, arrived_s) else None
                if landing is None and (self.requests.running or self.requests.waiting or self.live):
                    return
            self.waiting = [entry for entry in self.waiting if entry is not head]
            if future.set_running_or_notify_cancel():
                future.set_result(landing)
            elif landing:
                self._free(landing)

    def land(
        self, landing: IncomingPrefix, hidden_1D: Tensor | None, *, seconds: float | None = None
    ) -> bool:
        """Add a fetched prefix to the cache, after `seconds` of transfer; return whether it was possible."""
        layout = self.arena.layout
        if seconds is not None:
            self.rates.observe_copy(layout.state_bytes + len(landing.blocks) * layout.block_bytes, seconds)
        has_landed = landing in self.live and not landing.is_void
        if has_landed:
            table = [*landing.shared, *landing.blocks]
            hidden_1D = sent(hidden_1D, self.arena.data.device)
            self.cache.adopt(landing, landing.tenant, landing.ids, table, landing.state, hidden_1D)
        self.drop(landing)
        return has_landed

    def drop(self, landing: IncomingPrefix) -> None:
        """Release a landing's memory; idempotent."""
        self._free(landing)
        self.advance()

    def begin_afresh(self) -> Collection[IncomingPrefix]:
        """Void all landings after an arena reset; return them, since their memory stays allocated."""
        for landing in self.live:
            landing.is_void = True
        return self.live

    def close(self) -> None:
        """Resolve all waiting with None, including later requests."""
        self.is_closed = True
        while self.waiting:
            future = self.waiting.pop().future
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _is_next(self, tenant: Tenant, arrived_s: float) -> bool:
        """Return whether its request would be admitted next; memory taken earlier might be evicted unused."""
        requests = self.requests
        if not requests.comes_before_waiting(tenant, arrived_s):
            return False
        return len(requests.running) + len(self.live) < requests.max_running

    def _is_worth(self, tenant: Tenant, ids: Ids) -> bool:
        """Return whether fetching is faster than computing the missing part."""
        length, cached = len(ids), self.cache.longest(tenant, ids)
        work, layout = self.cache.score.work, self.arena.layout
        num_bytes = layout.state_bytes + layout.blocks_for(length - cached) * layout.block_bytes
        self.rates.read_s = self.cache.rates.read_s
        if length - cached < WORTH_FETCHING:
            return False
        is_faster = self.rates.pays(num_bytes, work(length) - work(cached))
        if not is_faster:
            self.rates.doubt()
        return is_faster

    def _equipped(self, tenant: Tenant, ids: Ids) -> IncomingPrefix | None:
        """Share cached blocks and allocate the rest; None if memory is short."""
        tree, layout = self.cache.tree, self.arena.layout
        node, cached = tree.walk(tenant, ids)
        shared = tree.table(node, cached)[: tree.first(cached)] if tree.pages else []
        landing = IncomingPrefix(tenant, ids, shared, len(shared) * layout.block_tokens)
        for block in shared:
            self.arena.share_block(landing, block)
        # The request will copy blocks it writes; one spare block per running request lets those grow.
        headroom = 2 + len(self.requests.running) if layout.kv else 0
        blocks = layout.blocks_for(len(ids)) - len(shared) + headroom
        if self.arena.can_take(blocks=blocks, states=2 * layout.states_per_slab):
            landing.equip(self.arena)
            self.live.add(landing)
            return landing
        self.arena.release_owner(landing)
        return None

    def _free(self, landing: IncomingPrefix) -> None:
        if landing in self.live:
            self.live.remove(landing)
            self.arena.release_owner(landing)
