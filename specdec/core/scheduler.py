"""Schedules requests for each step, and preempts some when memory is short.

Running requests are ordered by admission. Each step lets them grow, then admits waiting ones while all their
tokens fit. If one cannot grow, the last admitted request is preempted and waits at the front. So the first
request of one caller always advances; a request that could never fit was refused on arrival.

Several callers share the engine fairly. Waiting requests and prefills are served in the order of `FairQueue`.
If a caller within its share waits for a slot or memory, the most recently admitted request of the caller
furthest above its share is preempted. With more callers than slots they take turns of `TURN_S`.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.config.tenant import Tenant
from specdec.core.batch import ScheduledRequest
from specdec.core.fairness import FairQueue, FairShares, by_caller
from specdec.core.kv_connector import KVConnector
from specdec.core.request import Request
from specdec.core.work import WorkBudget
from specdec.errors import CapacityError
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState, release_path
from specdec.state_slots.prefix.cache import PrefixCache, as_ids
from specdec.state_slots.prefix.lease import PrefixHit, PrefixLease
from specdec.state_slots.prefix.tree import common

logger = logging.getLogger(__name__)

BLOCKS, STATES, PREFIXES = "KV blocks", "state slots", "prefixes"
"""Resources a request may wait for; `PREFIXES` is a prefix that another request is computing."""
DRAFT_BLOCKS, DRAFT_SLOTS, DEVICE_SLOTS = "draft blocks", "draft slots", "slots of steps on the device"
"""Resources that drafts and device steps may lack."""
RUNNING, CHUNK = "max_running", "chunk_tokens"
"""Settings that may keep a request waiting."""
RESOURCES = (BLOCKS, STATES, PREFIXES, RUNNING, CHUNK, DRAFT_BLOCKS, DRAFT_SLOTS, DEVICE_SLOTS)
"""All keys of `limited_by`."""
ADMITTING_S = 0.03
"""Seconds after which a step with several callers admits no more. Admission takes 2 to 15 ms, more with a
longer cached prefix and where memory is touched for the first time."""
MOST_PARKED = 4
"""Maximum preemptions per step for other callers' shares: the head processes up to `chunk_tokens` of each."""
TURN_S = 2.0
"""Seconds a caller waits for a slot before another's only request may be preempted for it. That request must
have decoded as long, and at least as long as its prefill took."""
WORTH_WAITING = 64
"""Minimum shared prefix worth waiting for."""


@dataclass(slots=True)
class SchedulerEvents:
    """Events since the last plan, in this order."""

    preempted: list[Request] = field(default_factory=list)
    dropped: list[Request] = field(default_factory=list)
    """Cancelled or refused requests, which have sent their last delta."""
    admitted: list[tuple[Request, PrefixHit | None]] = field(default_factory=list)
    """With each one's cache hit, if any."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    rows: tuple[ScheduledRequest, ...]
    events: SchedulerEvents
    has_more: bool
    """Whether admission stopped at its time limit, with requests waiting that may fit."""


class Folder(Protocol):
    """Folds accepted records into their states, so that the records can be released."""

    def fold(self, committed: Sequence[CommittedState]) -> None: ...


class Scheduler:
    """Owns waiting and running requests and their part of the arena."""

    def __init__(
        self,
        arena: Arena,
        folder: Folder,
        *,
        max_running: int,
        chunk_tokens: int,
        work: Callable[[int], float] = float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`work(n)` is the work of prefilling n tokens."""
        self.arena, self.folder, self.clock = arena, folder, clock
        self.max_running, self.chunk_tokens = max_running, chunk_tokens
        self.cache: PrefixCache | None = None
        """Prefix cache, or None."""
        self.park: Callable[[Sequence[Request]], None] = lambda _: None
        """Inserts requests' tokens into the prefix cache before they are preempted."""
        self.waiting = FairQueue()
        self.running: list[Request] = []
        self.limited_by: Counter[str] = Counter()
        """Number of steps that left a request waiting, by resource."""
        self.preemptions = 0
        self.is_paused = False
        """Whether admission is stopped until `resume`."""
        self.is_catching_up = False
        """Whether requests preempted by the last pause are still being recomputed; thread-safe."""
        self._paused: list[Request] = []
        """Requests preempted by the last pause."""
        self.connector = KVConnector()
        """Transfers KV cache between engines."""
        self._waits_for_others = False
        """Whether nothing can run before another engine finishes a read or write."""
        self._last_limit = ""
        self._events = SchedulerEvents()
        self._known: dict[str, FairShares] = {}
        """Shares by resource, until the running requests change."""
        self.work = WorkBudget(work)
        self._steps = 0
        self._num_parked = 0
        """Requests preempted in this step for other callers' shares."""

    def keep_prefixes(self, cache: PrefixCache | None) -> None:
        """Enable the prefix cache, or disable it with None."""
        self.cache = cache

    def submit(self, request: Request) -> None:
        request.since_s = self.clock()
        self.waiting.append(request)

    def charge(self, requests: Iterable[Request]) -> None:
        """Charge callers for the tokens of a step; recomputation after a preemption is free."""
        computed = []
        for request in requests:
            if (tokens := request.num_computed_tokens - request.charged_tokens) > 0:
                computed.append((request.tenant, tokens))
                request.charged_tokens += tokens
        self.waiting.charge(computed)

    @property
    def has_work(self) -> bool:
        can_wait = self.waiting and not self._waits_for_others
        # A step gives memory to waiting transfers.
        can_transfer = not self.waiting and self.connector.can_start
        return not self.is_paused and bool(can_wait or self.running or can_transfer)

    def pause(self) -> None:
        """Preempt all running requests and stop admission until `resume`; the order is preserved."""
        self._paused = [*self.running, *(r for r in self._paused if r in self.waiting)]
        self.is_paused, self.is_catching_up = True, bool(self._paused)
        while self.running:
            self._preempt(self.running[-1])

    def resume(self) -> None:
        """Admit requests again; preempted ones are recomputed and continue with the same text."""
        self.is_paused = False

    def _note_catching_up(self) -> None:
        """Update `is_catching_up`; requests that lack memory do not count."""
        waits = self._last_limit in ("", CHUNK, PREFIXES)
        self.is_catching_up = any(
            request.finish_reason is None and not request.is_decoding and (waits or request in self.running)
            for request in self._paused
        )
        if not self.is_catching_up:
            self._paused = []

    def schedule(self) -> StepPlan:
        """Plan a step; every request in it owns the memory its row needs.

        A decode request takes part unless its grammar mask is missing or the work budget is used up. Prefills
        share `chunk_tokens`, those of the caller furthest behind first.
        """
        self._drop_cancelled()
        self._waits_for_others = False
        for request in tuple(self.running):
            if request not in self._events.preempted:
                self._grow(request)
        self._num_parked = 0
        has_more = False
        until_s = self.clock() + ADMITTING_S
        while not has_more and self._admit():
            has_more = self.clock() >= until_s and len(by_caller(self.running)) > 1
        has_more |= self._num_parked >= MOST_PARKED
        if self._paused and not self.is_paused:
            self._note_catching_up()
        rows = self._rows()
        events, self._events = self._events, SchedulerEvents()
        return StepPlan(rows, events, has_more)

    def _rows(self) -> tuple[ScheduledRequest, ...]:
        """Return the step's rows, within the work budget if several callers run."""
        self._steps += 1
        self.work.begin({caller: self.waiting.weight(caller) for caller in by_caller(self.running)})
        chunks, counts = self._chunks(), dict[Request, int]()
        for request in self._in_turn():
            count = chunks.get(request, request.num_schedulable_tokens)
            if not count or (count == request.num_uncomputed_tokens and not request.chooser.knows()):
                continue
            count = self.work.take(request.tenant.flow[0], count, request.num_computed_tokens)
            if count:
                counts[request], request.last_step = count, self._steps
        return tuple(
            ScheduledRequest.of(request, counts[request]) for request in self.running if request in counts
        )

    def _in_turn(self) -> Iterable[Request]:
        """Return running requests, callers alternating by weight, each caller's least recent first."""
        turns, counts = dict[Request, float](), Counter[str]()
        for request in sorted(self.running, key=lambda item: item.last_step):
            caller = request.tenant.flow[0]
            counts[caller] += 1
            turns[request] = counts[caller] / self.waiting.weight(caller)
        return sorted(turns, key=turns.__getitem__)

    def _prefills(self) -> list[Request]:
        """Return running requests with more than one uncomputed token, in the order of their callers."""
        prefills = [request for request in self.running if request.num_uncomputed_tokens > 1]
        return sorted(prefills, key=lambda request: self.waiting.rank(request.tenant))

    def _chunks(self) -> dict[Request, int]:
        """Divide `chunk_tokens` among prefills; return the number of tokens each computes."""
        budget, chunks, now_s = self.chunk_tokens, {}, self.clock()
        for request in self._prefills():
            request.turn_until_s = now_s + max(TURN_S, now_s - request.since_s)
            chunks[request] = min(request.num_schedulable_tokens, budget)
            budget -= chunks[request]
        return chunks

    def release(self, request: Request) -> None:
        """Release a request's memory and remove it.

        It leaves the lists last: if anything fails before, it is still among the requests that an error ends.
        """
        lease = request.lease
        if lease and self.cache and not request.first_token_s and lease.extended_from is not None:
            # Its newly cached prefix was never checked for NaN.
            self.cache.cut(lease, lease.extended_from)
        self._take_back(request)

    def give_up(self) -> list[Request]:
        """Remove and return requests that a failed step may have corrupted.

        These are all running requests, or else the first waiting one, whatever blocks it. Their memory is
        released elsewhere. The other waiting requests own no memory and are unaffected.
        """
        self._events = SchedulerEvents()
        failed, self.running = self.running, []
        if not failed and self.waiting:
            first = self.waiting.first()
            assert first
            self.waiting.remove(first)
            failed = [first]
        return failed

    def reserve(self, request: Request, positions: int) -> bool:
        """Take the blocks of `positions` for a draft if they are free; return whether they were."""
        missing = self.arena.layout.blocks_for(positions) - request.table_N.numel()
        if missing <= 0:
            return True
        blocks = self.arena.take_blocks(request.number, missing)
        if blocks is None:
            self.limited_by[DRAFT_BLOCKS] += 1
            return False
        request.add_blocks(blocks)
        return True

    def trim(self, request: Request) -> bool:
        """Release blocks taken for a draft that are no longer needed; return whether there were any."""
        needed = self.arena.layout.blocks_for(len(request.tokens))
        surplus = request.table_N[needed:].tolist()
        if surplus:
            self.arena.release_blocks(request.number, surplus)
            request.table_N = request.table_N[:needed]
        return bool(surplus)

    def reclaim(self) -> bool:
        """Fold all running requests' paths and release draft memory; return whether there was any."""
        held = [(r, r.committed) for r in self.running if r.committed and r.committed.path]
        if held:
            self.folder.fold([committed for _, committed in held])
            for request, committed in held:
                request.committed = release_path(self.arena, request.number, committed)
        trimmed = [self.trim(request) for request in self.running]
        return bool(held) or any(trimmed)

    def _take_back(self, request: Request) -> None:
        self.arena.release_owner(request.number)
        if request.lease and self.cache:
            self.cache.leave(request.lease)
        request.forget_memory()
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _drop_cancelled(self) -> None:
        for request in [r for r in (*self.running, *self.waiting) if r.cancelled]:
            self.release(request)
            self._events.dropped.append(request)
            request.abort()

    def _blocks_missing(self, request: Request) -> int:
        return self.arena.layout.blocks_for(len(request.tokens)) - request.table_N.numel()

    def _grow(self, request: Request) -> bool:
        """Take blocks for all of a request's tokens, preempting the youngest requests as needed.

        Return False if the request itself was the youngest.
        """
        while (missing := self._blocks_missing(request)) > 0:
            blocks = self.arena.take_blocks(request.number, missing)
            if blocks is not None:
                request.add_blocks(blocks)
                break
            if self.reclaim():
                continue
            self._known.clear()
            victim = self._youngest(self._shares(BLOCKS).above) or self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Preempt a running request; it waits at the front and is recomputed."""
        logger.info("preempted request %d: no KV block was free", request.number)
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        if request.is_prefill_only:
            self.connector.request_preempted(request)
        self._take_back(request)
        self._events.preempted.append(request)
        self.waiting.appendleft(request)
        request.since_s = self.clock()
        request.preemptions += 1
        self.preemptions += 1

    def _admit(self) -> bool:
        """Admit the next waiting request if its state and all its tokens fit; return whether one was.

        After a request that lacks memory, other callers are admitted while they stay within their shares.
        """
        if not self.waiting or self.is_paused:
            return False
        pending: Counter[str] = Counter()
        for running in self.running:
            pending[running.tenant.flow[0]] += running.num_uncomputed_tokens - running.is_decoding
        self._known.clear()
        is_blocked = False
        for i, request in enumerate(self.waiting.heads(pending, self._shares(RUNNING))):
            if is_blocked and not self._shares(BLOCKS).fits(request.tenant, self._num_bytes(request)):
                continue
            lease, limit = self._claim_room(request)
            if not limit:
                self._start(request, lease)
                return True
            self._waits_for_others = not self.running and bool(self.connector.owners)
            if not self.running and not self._waits_for_others:
                self._refuse(request, limit)
                return False
            if i == 0:
                self._note_limit(request, limit)
            if limit == CHUNK:  # later requests have no step budget either
                return False
            is_blocked |= limit in (BLOCKS, STATES)
        return False

    def _claim_room(self, request: Request) -> tuple[PrefixLease | None, str]:
        """Find a slot and memory for a request, preempting callers above their shares if it is entitled.

        Return its lease, and the resource it lacks or "". Nothing is preempted for a request that would have
        to wait anyway.
        """
        is_full = len(self.running) >= self.max_running
        victim = self._victim(request, RUNNING) if is_full else None
        if is_full and victim is None:
            return None, RUNNING
        lease = self._lease(request)
        if lease and self._is_being_read(request, lease):
            limit = PREFIXES
        elif self._chunk_is_full(request):
            limit = CHUNK
        else:
            if victim:
                self._park(victim)
            lease, limit = self._memory_for(request, lease)
            while limit and (victim := self._victim(request, limit)):
                self._leave(lease)
                self._park(victim)
                lease, limit = self._memory_for(request, self._lease(request))
        if limit:
            self._leave(lease)
        return lease, limit

    def _leave(self, lease: PrefixLease | None) -> None:
        if self.cache and lease:
            self.cache.leave(lease)

    def _start(self, request: Request, lease: PrefixLease | None) -> None:
        self._last_limit = ""
        self.waiting.remove(request)
        self.running.append(request)
        request.since_s = self.clock()
        request.turn_until_s = request.since_s + TURN_S
        request.start()
        self._equip(request, lease)

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """Return a tenant's virtual times, the smallest served first."""
        return self.waiting.rank(tenant)

    def comes_before_waiting(self, tenant: Tenant, arrived_s: float) -> bool:
        """Return whether a request of this tenant would be admitted before all waiting ones."""
        first = self.waiting.first()
        if first is None or first.tenant.flow[0] == tenant.flow[0]:
            return first is None or arrived_s <= first.arrived_s
        return self.waiting.rank(tenant) <= self.waiting.rank(first.tenant)

    def may_preempt(self) -> bool:
        """Return whether a waiting request is entitled to the slot of a running one."""
        self._known.clear()
        shares = self._shares(RUNNING)
        return bool(shares.above) and any(
            shares.is_entitled(request.tenant, 1) for request in self.waiting.heads()
        )

    def _victim(self, request: Request, limit: str) -> Request | None:
        """Return the request to preempt for one that is entitled to the resource it lacks, or None."""
        shares, more = self._shares(limit), 1 if limit == RUNNING else self._num_bytes(request)
        if self._num_parked >= MOST_PARKED or not shares.is_entitled(request.tenant, more):
            return None
        victim = self._youngest(shares.above)
        return victim or (self._turn_over(request) if limit == RUNNING else None)

    def may_take_turn(self) -> bool:
        """Return whether a waiting request takes over a slot whose turn has ended."""
        self._known.clear()
        is_full = len(self.running) >= self.max_running
        return is_full and any(map(self._turn_over, self.waiting.heads()))

    def _turn_over(self, request: Request) -> Request | None:
        """Return the request to preempt because its turn has ended, of the most served caller, or None."""
        now_s, caller = self.clock(), request.tenant.flow[0]
        if now_s < request.since_s + TURN_S or self._shares(RUNNING).held.get(caller):
            return None
        rank = self.waiting.rank
        others = [other for other in self.running if other.is_decoding and other.turn_until_s <= now_s]
        victim = max(others, key=lambda other: rank(other.tenant), default=None)
        return victim if victim and rank(victim.tenant) > rank(request.tenant) else None

    def _shares(self, limit: str) -> FairShares:
        """Return callers' usage and shares, of running requests or arena bytes."""
        if limit not in self._known:
            counts = by_caller(self.running)
            held, whole = counts, self.max_running
            if limit != RUNNING:
                held = Counter()
                for request in self.running:
                    held[request.tenant.flow[0]] += self._num_bytes(request)
                whole = self.arena.layout.slab_bytes * self.arena.usage().slabs
            self._known[limit] = self.waiting.shares(held, counts, whole)
        return self._known[limit]

    def _youngest(self, caller: str | None) -> Request | None:
        """Return a caller's last admitted request among the least preempted, excluding this step's."""
        if caller is None:
            return None
        new = [request for request, _ in self._events.admitted]
        candidates = [
            request
            for request in reversed(self.running)
            if request.tenant.flow[0] == caller and request not in new
        ]
        return min(candidates, key=lambda request: request.preemptions, default=None)

    def _num_bytes(self, request: Request) -> int:
        """Return a request's bytes, without those shared with a cached prefix."""
        shared = request.lease.shared * self.arena.layout.block_bytes if request.lease else 0
        return self.arena.layout.sequence_bytes(len(request.tokens)) - shared

    def _park(self, request: Request) -> None:
        """Preempt a request for another caller's share; it resumes from the prefix cache."""
        self._num_parked += 1
        self._known.clear()
        self.park([request])
        self._preempt(request)

    def _chunk_is_full(self, request: Request) -> bool:
        """Return whether earlier prefills use all of `chunk_tokens`."""
        rank = self.waiting.rank(request.tenant)
        before = (item for item in self._prefills() if self.waiting.rank(item.tenant) <= rank)
        return sum(item.num_schedulable_tokens for item in before) >= self.chunk_tokens

    def _is_being_read(self, request: Request, lease: PrefixLease) -> bool:
        """Return whether another request is computing a long shared prefix; cache its state at the fork.

        Waiting costs nothing: prompts share a step's budget in order.
        """
        for other in self.running:
            if not other.lease or other.lease.tenant != lease.tenant or other.num_uncomputed_tokens == 1:
                continue
            if other.tokens[:WORTH_WAITING] != request.tokens[:WORTH_WAITING]:
                continue
            num_shared = min(common(as_ids(other.tokens), as_ids(request.tokens)), len(request.tokens) - 1)
            if other.num_computed_tokens < num_shared and num_shared - lease.length >= WORTH_WAITING:
                other.lease.add_state_length(num_shared)
                return True
        return False

    def _memory_for(self, request: Request, lease: PrefixLease | None) -> tuple[PrefixLease | None, str]:
        """Return the lease and the memory that a request lacks after all possible eviction, or ""."""
        limit = self._limit(request, lease)
        if limit and self.reclaim():
            limit = self._limit(request, lease)
        if limit and self.cache and lease and not self.running:
            # The cached prefix itself may occupy the memory: compute all tokens instead.
            self.cache.leave(lease)
            requested, lease = lease.asked, self.cache.lease(request.tokens[:1], lease.tenant)
            lease.asked = requested
            limit = self._limit(request, lease)
        return lease, limit

    def _refuse(self, request: Request, limit: str) -> None:
        """Fail a waiting request that cannot fit even when nothing runs."""
        self.waiting.remove(request)
        self._events.dropped.append(request)
        request.fail(
            CapacityError(
                f"memory_bytes: the arena has no room for this request, which needs {limit}; raise it.",
                field="memory_bytes",
            )
        )

    def _equip(self, request: Request, lease: PrefixLease | None) -> None:
        """Give a request a state, blocks for all its tokens, and its cache hit."""
        state = None
        if self.arena.layout.states:
            state = self.arena.take_state(request.number)
            assert state is not None
            request.committed = CommittedState(state)
        hit = self.cache.lend(request.number, lease, state) if self.cache and lease else None
        if hit and lease:
            request.begin_at(hit.length, hit.blocks, lease)
        self._events.admitted.append((request, hit))
        blocks = self.arena.take_blocks(request.number, self._blocks_missing(request))
        assert blocks is not None
        request.add_blocks(blocks)
        if self.cache and lease and hit and hit.fetched:
            node = self.cache.note(lease, request.tokens[: hit.length], request.table_N.tolist())
            self.cache.keep_copy(node, state, hit.hidden_1D)

    def _lease(self, request: Request) -> PrefixLease | None:
        """Return a lease on a request's cached prefix; None if every token must be computed."""
        if self.cache is None or request.params.prompt_logprobs is not None:
            return None
        marks = request.params.cache_marks or ()
        return self.cache.lease(request.tokens, request.tenant, marks, request.turns)

    def _limit(self, request: Request, lease: PrefixLease | None) -> str:
        """Return the memory that a request lacks besides its shared prefix, or "".

        One spare block per running request lets those grow.
        """
        states = int(bool(self.arena.layout.states))
        spare = len(self.running) if self.arena.layout.kv else 0
        blocks = self._blocks_missing(request) - (lease.shared if lease else 0) + spare
        if self.arena.can_take(blocks=blocks, states=states):
            return ""
        return BLOCKS if self.arena.might_take(states=states) else STATES

    def _note_limit(self, request: Request, limit: str) -> None:
        self.limited_by[limit] += 1
        if limit != self._last_limit:
            needed = self._num_bytes(request)
            logger.info(
                "%d requests wait for %s (the next needs %d bytes); %d run; %s",
                *(len(self.waiting), limit, needed, len(self.running), self.arena.usage()),
            )
            self._last_limit = limit
