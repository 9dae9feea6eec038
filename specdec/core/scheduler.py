"""Which requests take part in a step, and which is preempted when there is too little memory.

Running requests stand in the order of their admission. A step lets each of them grow, admits waiting ones
while there is memory for all of their tokens, and when one cannot grow, the last admitted gives back what it
holds and waits at the front. The first of one caller therefore always advances; what could never fit was
refused before.

Several callers share the engine fairly. Waiting requests and prefills are served in the order of `FairQueue`.
If a caller within its share waits for a place or for memory, the most recently admitted request of the caller
furthest above its share is preempted. With more callers than places they take turns of `TURN_S`.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.config.tenant import Tenant
from specdec.core.batch import ScheduledRequest
from specdec.core.fairness import FairQueue, Shares, by_caller
from specdec.core.kv_connector import KVConnector
from specdec.core.request import Request
from specdec.core.work import WorkBudget
from specdec.errors import CapacityError
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed, release_path
from specdec.state_slots.prefix.cache import PrefixCache, as_ids
from specdec.state_slots.prefix.lease import Hit, Lease
from specdec.state_slots.prefix.tree import common

logger = logging.getLogger(__name__)

BLOCKS, STATES, PREFIXES = "KV blocks", "state slots", "prefixes"
"""What of the arena a request may have to wait for; and a prefix that another is computing."""
DRAFT_BLOCKS, DRAFT_SLOTS, DEVICE_SLOTS = "draft blocks", "draft slots", "slots of steps on the device"
"""What a draft may be short of, and a step on the device."""
RUNNING, CHUNK = "max_running", "chunk_tokens"
"""The settings that may keep a request waiting."""
RESOURCES = (BLOCKS, STATES, PREFIXES, RUNNING, CHUNK, DRAFT_BLOCKS, DRAFT_SLOTS, DEVICE_SLOTS)
"""All that steps may be short of, by which `limited_by` counts."""
ADMITTING_S = 0.03
"""Seconds after which a step beside another caller admits no more: a request takes 2 to 15 ms, the more the
longer its cached prefix, and where its memory is touched for the first time."""
MOST_PARKED = 4
"""Requests preempted per step for other callers' shares: a head reads up to `chunk_tokens` of each."""
TURN_S = 2.0
"""How long a caller waits for a place before another's only request may be preempted for it, which has run as
long since its prefill, and at least as long as that took."""
WORTH_WAITING = 64
"""From this many tokens on, waiting for another's prefill is better than repeating it."""


@dataclass(slots=True)
class Events:
    """What has happened to requests since the last plan, in this order."""

    preempted: list[Request] = field(default_factory=list)
    dropped: list[Request] = field(default_factory=list)
    """They were cancelled or refused, and have emitted their last."""
    admitted: list[tuple[Request, Hit | None]] = field(default_factory=list)
    """With what each need not read, if anything."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    rows: tuple[ScheduledRequest, ...]
    events: Events
    has_more: bool
    """Whether admission stopped at its bound for one step, with requests waiting that may fit."""


class Folder(Protocol):
    """Brings states up to date with the accepted records beside them, which can be given back then."""

    def fold(self, committed: Sequence[Committed]) -> None: ...


class Scheduler:
    """Owns the waiting and the running requests and all that they hold of the arena."""

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
        """Bound the work of a step; `work(n)` is that of prefilling n tokens."""
        self.arena, self.folder, self.clock = arena, folder, clock
        self.max_running, self.chunk_tokens = max_running, chunk_tokens
        self.cache: PrefixCache | None = None
        """What earlier requests have read; None: nothing is kept."""
        self.park: Callable[[Sequence[Request]], None] = lambda _: None
        """Inserts requests' tokens into the prefix cache before they are preempted."""
        self.waiting = FairQueue()
        self.running: list[Request] = []
        self.limited_by: Counter[str] = Counter()
        """How many steps left a request waiting, by what it waited for."""
        self.preemptions = 0
        self.is_paused = False
        """Whether nothing is admitted: all wait for `resume`."""
        self.is_catching_up = False
        """Whether what the last pause took back is still to be computed anew; any thread may ask."""
        self._paused: list[Request] = []
        """Those that it took back."""
        self.connector = KVConnector()
        """Moves KV cache between engines, where more than one serves a prompt."""
        self._waits_for_others = False
        """Whether nothing can run before another engine has read, or written, what it is to."""
        self._last_limit = ""
        self._events = Events()
        self._known: dict[str, Shares] = {}
        """Shares by what is short, until the running requests change."""
        self.work = WorkBudget(work)
        self._steps = 0
        self._num_parked = 0
        """Requests preempted in this step for other callers' shares."""

    def keep_prefixes(self, cache: PrefixCache | None) -> None:
        """Share what requests have read with later ones; None: no longer."""
        self.cache = cache

    def submit(self, request: Request) -> None:
        request.since_s = self.clock()
        self.waiting.append(request)

    def charge(self, requests: Iterable[Request]) -> None:
        """Charge callers for the tokens of a step; what a preemption has computed again is free."""
        computed = []
        for request in requests:
            if (tokens := request.num_computed_tokens - request.charged_tokens) > 0:
                computed.append((request.tenant, tokens))
                request.charged_tokens += tokens
        self.waiting.charge(computed)

    @property
    def has_work(self) -> bool:
        can_wait = self.waiting and not self._waits_for_others
        # Transfers that wait for memory get it in a step.
        can_transfer = not self.waiting and self.connector.can_start
        return not self.is_paused and bool(can_wait or self.running or can_transfer)

    def pause(self) -> None:
        """Preempt all that run, and admit none until `resume`; the order of requests stays."""
        self._paused = [*self.running, *(r for r in self._paused if r in self.waiting)]
        self.is_paused, self.is_catching_up = True, bool(self._paused)
        while self.running:
            self._preempt(self.running[-1])

    def resume(self) -> None:
        """Admit requests again; those that were preempted are computed anew, and go on with the same text."""
        self.is_paused = False

    def _note_catching_up(self) -> None:
        """Note whether all have caught up except those that lack memory: these wait for others."""
        waits = self._last_limit in ("", CHUNK, PREFIXES)
        self.is_catching_up = any(
            own.finish_reason is None and not own.is_decoding and (waits or own in self.running)
            for own in self._paused
        )
        if not self.is_catching_up:
            self._paused = []

    def schedule(self) -> StepPlan:
        """Choose the step's rows; every request in them holds the memory that its row needs.

        A request that decodes takes part unless it is not known yet what may be chosen, or other callers'
        streams would pause for long; prefills share the budget of `chunk_tokens`, those of the caller that is
        furthest behind first.
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
        events, self._events = self._events, Events()
        return StepPlan(rows, events, has_more)

    def _rows(self) -> tuple[ScheduledRequest, ...]:
        """Choose the step's rows, within the work budget if several callers run."""
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
        return tuple(ScheduledRequest.of(own, counts[own]) for own in self.running if own in counts)

    def _in_turn(self) -> Iterable[Request]:
        """Return running requests, callers in turn by weight, and of each those that waited longest first."""
        turns, counts = dict[Request, float](), Counter[str]()
        for request in sorted(self.running, key=lambda own: own.last_step):
            caller = request.tenant.flow[0]
            counts[caller] += 1
            turns[request] = counts[caller] / self.waiting.weight(caller)
        return sorted(turns, key=turns.__getitem__)

    def _prefills(self) -> list[Request]:
        """Return running requests with more than one uncomputed token, in the order of their callers."""
        prefills = [request for request in self.running if request.num_uncomputed_tokens > 1]
        return sorted(prefills, key=lambda request: self.waiting.rank(request.tenant))

    def _chunks(self) -> dict[Request, int]:
        """Divide `chunk_tokens` among prefills; return the number of tokens that each computes."""
        budget, chunks, now_s = self.chunk_tokens, {}, self.clock()
        for request in self._prefills():
            request.turn_until_s = now_s + max(TURN_S, now_s - request.since_s)
            chunks[request] = min(request.num_schedulable_tokens, budget)
            budget -= chunks[request]
        return chunks

    def release(self, request: Request) -> None:
        """Take back all that a request holds and forget it.

        It leaves the lists last: where anything fails before, it still counts among those that an error ends.
        """
        if request.lease and self.cache and not request.first_token_s and request.lease.own is not None:
            # What it was the first to read has never been seen to give numbers.
            self.cache.cut(request.lease, request.lease.own)
        self._take_back(request)

    def give_up(self) -> list[Request]:
        """Drop and return what a failed step may have spoilt, whose memory is taken back elsewhere.

        That is all that run, or where none does the first that waits: whatever it is that keeps it out. The
        others have no memory, and go on as they are.
        """
        self._events = Events()
        spoilt, self.running = self.running, []
        if not spoilt and self.waiting:
            first = self.waiting.first()
            assert first
            self.waiting.remove(first)
            spoilt = [first]
        return spoilt

    def reserve(self, request: Request, positions: int) -> bool:
        """Get the blocks of `positions` for a draft, if they are free."""
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
        """Take back the blocks that a request got for a draft and does not need; tell whether it had any."""
        needed = self.arena.layout.blocks_for(len(request.tokens))
        surplus = request.table_N[needed:].tolist()
        if surplus:
            self.arena.release_blocks(request.number, surplus)
            request.table_N = request.table_N[:needed]
        return bool(surplus)

    def reclaim(self) -> bool:
        """Fold all running requests' paths and give back what drafts held; tell whether that was anything."""
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
        """Get blocks for every token that the request has, preempting the youngest until there are enough.

        False: the request itself was the youngest.
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
        """Take a running request's memory back; it waits at the front to be computed anew."""
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
        """Move the next waiting request to the running ones if its state and all its tokens fit.

        Behind a request that lacks memory, callers are admitted as long as they stay within their shares.
        """
        if not self.waiting or self.is_paused:
            return False
        pending: Counter[str] = Counter()
        for own in self.running:
            pending[own.tenant.flow[0]] += own.num_uncomputed_tokens - own.is_decoding
        self._known.clear()
        is_blocked = False
        for place, request in enumerate(self.waiting.heads(pending, self._shares(RUNNING))):
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
            if place == 0:
                self._note_limit(request, limit)
            if limit == CHUNK:  # what comes later has no more of the step's budget
                return False
            is_blocked |= limit in (BLOCKS, STATES)
        return False

    def _claim_room(self, request: Request) -> tuple[Lease | None, str]:
        """Find a place and memory for a request, preempting callers above their shares if it is entitled.

        Return its lease, and what it lacks, if anything. Nothing is preempted before that is all it lacks.
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

    def _leave(self, lease: Lease | None) -> None:
        if self.cache and lease:
            self.cache.leave(lease)

    def _start(self, request: Request, lease: Lease | None) -> None:
        self._last_limit = ""
        self.waiting.remove(request)
        self.running.append(request)
        request.since_s = self.clock()
        request.turn_until_s = request.since_s + TURN_S
        request.start()
        self._equip(request, lease)

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """Return the virtual times by which tenants are served, the smallest first."""
        return self.waiting.rank(tenant)

    def comes_before_waiting(self, tenant: Tenant, arrived_s: float) -> bool:
        """Return whether a request of this tenant would be admitted before all that wait."""
        first = self.waiting.first()
        if first is None or first.tenant.flow[0] == tenant.flow[0]:
            return first is None or arrived_s <= first.arrived_s
        return self.waiting.rank(tenant) <= self.waiting.rank(first.tenant)

    def may_preempt(self) -> bool:
        """Return whether a waiting request is entitled to a place among those that run."""
        self._known.clear()
        shares = self._shares(RUNNING)
        return bool(shares.above) and any(shares.is_entitled(own.tenant, 1) for own in self.waiting.heads())

    def _victim(self, request: Request, limit: str) -> Request | None:
        """Return the request to preempt for another that is entitled to what it lacks."""
        shares, more = self._shares(limit), 1 if limit == RUNNING else self._num_bytes(request)
        if self._num_parked >= MOST_PARKED or not shares.is_entitled(request.tenant, more):
            return None
        victim = self._youngest(shares.above)
        return victim or (self._turn_over(request) if limit == RUNNING else None)

    def may_take_turn(self) -> bool:
        """Return whether a waiting request is to get the place of one whose turn is over."""
        self._known.clear()
        is_full = len(self.running) >= self.max_running
        return is_full and any(map(self._turn_over, self.waiting.heads()))

    def _turn_over(self, request: Request) -> Request | None:
        """Return the request whose turn is over for one that has waited, of the caller served most."""
        now_s, caller = self.clock(), request.tenant.flow[0]
        if now_s < request.since_s + TURN_S or self._shares(RUNNING).held.get(caller):
            return None
        rank = self.waiting.rank
        others = [own for own in self.running if own.is_decoding and own.turn_until_s <= now_s]
        victim = max(others, key=lambda own: rank(own.tenant), default=None)
        return victim if victim and rank(victim.tenant) > rank(request.tenant) else None

    def _shares(self, limit: str) -> Shares:
        """Compare what callers hold, running requests or bytes of the arena, with their shares."""
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
        """Return a caller's last admitted request of those least preempted, but none of this step's."""
        if caller is None:
            return None
        new = [request for request, _ in self._events.admitted]
        own = [own for own in reversed(self.running) if own.tenant.flow[0] == caller and own not in new]
        return min(own, key=lambda request: request.preemptions, default=None)

    def _num_bytes(self, request: Request) -> int:
        """Return the memory of a request beside what it shares with a cached prefix."""
        shared = request.lease.shared * self.arena.layout.block_bytes if request.lease else 0
        return self.arena.layout.sequence_bytes(len(request.tokens)) - shared

    def _park(self, request: Request) -> None:
        """Preempt a request for another caller's share; it resumes from the prefix cache."""
        self._num_parked += 1
        self._known.clear()
        self.park([request])
        self._preempt(request)

    def _chunk_is_full(self, request: Request) -> bool:
        """Return whether prefills that come before a request use all of `chunk_tokens`."""
        rank = self.waiting.rank(request.tenant)
        before = (own for own in self._prefills() if self.waiting.rank(own.tenant) <= rank)
        return sum(own.num_schedulable_tokens for own in before) >= self.chunk_tokens

    def _is_being_read(self, request: Request, lease: Lease) -> bool:
        """Return whether another computes much of what this one would; cache its state where the two part.

        To wait for it costs nothing: prompts share a step's budget in order.
        """
        for other in self.running:
            if not other.lease or other.lease.tenant != lease.tenant or other.num_uncomputed_tokens == 1:
                continue
            if other.tokens[:WORTH_WAITING] != request.tokens[:WORTH_WAITING]:
                continue
            alike = min(common(as_ids(other.tokens), as_ids(request.tokens)), len(request.tokens) - 1)
            if other.num_computed_tokens < alike and alike - lease.length >= WORTH_WAITING:
                other.lease.stop_at(alike)
                return True
        return False

    def _memory_for(self, request: Request, lease: Lease | None) -> tuple[Lease | None, str]:
        """Name the memory that a request lacks, if any, when all has been evicted that can be."""
        limit = self._limit(request, lease)
        if limit and self.reclaim():
            limit = self._limit(request, lease)
        if limit and self.cache and lease and not self.running:
            # What it would go on from may be what stands in its way: it reads all of its tokens itself.
            self.cache.leave(lease)
            asked, lease = lease.asked, self.cache.lease(request.tokens[:1], lease.tenant)
            lease.asked = asked
            limit = self._limit(request, lease)
        return lease, limit

    def _refuse(self, request: Request, limit: str) -> None:
        """Fail a waiting request: nothing runs that will ever make room for it."""
        self.waiting.remove(request)
        self._events.dropped.append(request)
        request.fail(
            CapacityError(
                f"memory_bytes: the arena has no room for this request, which needs {limit}; raise it.",
                field="memory_bytes",
            )
        )

    def _equip(self, request: Request, lease: Lease | None) -> None:
        """Give a request a state and blocks for all of its tokens, and what its lease has found in them."""
        state = None
        if self.arena.layout.states:
            state = self.arena.take_state(request.number)
            assert state is not None
            request.committed = Committed(state)
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

    def _lease(self, request: Request) -> Lease | None:
        """Return a lease on the cached prefix of a request, unless each of its tokens has to be computed."""
        if self.cache is None or request.params.prompt_logprobs is not None:
            return None
        marks = request.params.cache_marks or ()
        return self.cache.lease(request.tokens, request.tenant, marks, request.turns)

    def _limit(self, request: Request, lease: Lease | None) -> str:
        """Name the memory that a request lacks beside what it shares.

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
