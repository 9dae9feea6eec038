"""Decide when steps run on the device, and commit their results on the host."""

import logging
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.core.batch import ScheduledRequest, StepResult
from specdec.core.device.device_batch import BatchOutput, DeviceBatch
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.lookups import HostLookups
from specdec.core.device.result import RowResult
from specdec.core.draft_record import DraftRecord
from specdec.core.request import Request
from specdec.core.scheduler import Scheduler
from specdec.core.speculation import Speculation
from specdec.core.stats import PhaseTimer, SpeculationCounts
from specdec.draft.decision import DraftDecision
from specdec.draft.proposal import DraftShape
from specdec.draft.uniform import UniformPolicy
from specdec.draft.widths import WIDTHS
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import AcceptedPath

logger = logging.getLogger(__name__)

Commit = Callable[[StepResult], None]
"""Commits a step's results to its requests."""

PLANNED = "drafts for several rows"
"""Refusal reason while drafts are planned; expected, so not logged."""
FEWEST = 0.5
"""Fraction of live rows below which the batch is reloaded as a smaller one."""
RELOAD, PATIENCE_S = 4.0, 0.5
"""While requests wait, finished rows stay idle until that has cost `RELOAD` times the loading of the batch,
to pay for unloading, scheduling and a host step, or for `PATIENCE_S`."""


@dataclass(frozen=True, slots=True)
class RunnerHost:
    """Parts of the decode loop that a runner uses."""

    scheduler: Scheduler
    speculation: Speculation
    counts: Callable[[], SpeculationCounts]
    """The current counts; they are replaced after warm-up."""
    commit: Commit


class Runner(ABC):
    """Moves requests to the device when all decode, and back when the host must plan a step."""

    def __init__(self, batch: DeviceBatch, host: RunnerHost) -> None:
        self.batch, self.host = batch, host
        self.steps = 0
        """Number of steps read."""
        self.refusals = Counter({PLANNED: 0})
        """Number of steps left to the host, by reason."""
        self._waiting = 0
        self._over = False
        self._was_full = False
        """Whether all slots of the batch were in use at its start."""
        self._free = 0
        """Number of rows whose requests have finished."""
        self._free_since_s: float | None = None
        self._next_turn_s = 0.0
        """Next time to check whether a waiting caller's turn has come."""
        self._load_s = self._idle_s = 0.0
        """Seconds to load the batch, and cost of idle rows since, by the step clock."""

    @property
    def outlook(self) -> DraftDecision | None:
        """Current drafting decision, if it is made for device steps."""
        return None

    @abstractmethod
    def graph_keys(self) -> list[GraphKey]:
        """Return the keys that steps may use, for capturing."""

    @abstractmethod
    def _reads(self, requests: Sequence[Request]) -> bool:
        """Return whether a head must process these requests' accepted tokens, so that it can draft."""

    @abstractmethod
    def _start(self) -> None:
        """Prepare newly loaded rows for their first step."""

    @abstractmethod
    def _advance(self) -> bool:
        """Run a step; return False without memory for it."""

    @abstractmethod
    def _drain(self) -> None:
        """Read all steps in flight."""

    def begin(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Run a step on the device if possible; return whether it ran."""
        requests = [row.request for row in rows]
        reason = self._refusal(requests)
        if reason is None:
            scheduler, clock = self.host.scheduler, self.host.speculation.clock
            self._waiting, self._over = len(scheduler.waiting), False
            self._was_full = len(scheduler.running) >= scheduler.max_running
            self._free, self._free_since_s, self._idle_s = 0, None, 0.0
            reads, drafts = self._reads(requests), not self._drafts_on_host(requests)
            start_s = clock()
            is_loaded = self.batch.begin(requests, reads=reads, drafts=drafts)
            self._load_s = clock() - start_s
            if is_loaded and self._run(first=True):
                return True
            reason = "no memory for the batch, or a head that must catch up"
        if reason not in self.refusals:
            logger.info("steps run on the host, without graphs: %s (logged once)", reason)
        self.refusals[reason] += 1
        return False

    def go_on(self) -> bool:
        """Run the next step of the batch on the device; return False if there is none or it has ended."""
        if not self.batch.held:
            return False
        self._over = self._over or self._is_interrupted()
        return self._run()

    def reset_counts(self) -> None:
        """Reset the counts; reasons already logged are not logged again."""
        self.steps = 0
        self.refusals = Counter(dict.fromkeys(self.refusals, 0))

    def stop(self) -> None:
        """Unload the batch, if any, after reading its steps in flight."""
        if self.batch.held:
            self._drain()
            self.batch.end()

    def abandon(self) -> None:
        """Drop the batch after a failed step."""
        self.batch.abandon()

    def _run(self, *, first: bool = False) -> bool:
        """Run a step and unload the batch if it has ended; return whether a step ran."""
        if first:
            self._start()
        advanced = not self._over and self._advance()
        self._over |= self.batch.steps.refusal([held.request for held in self.batch.held]) is not None
        if self._over or not advanced or len(self.batch.requests) <= FEWEST * len(self.batch.held):
            self.stop()
        return advanced

    def _drafts_on_host(self, requests: Sequence[Request]) -> bool:
        """Return whether planned drafts for these requests run on the host."""
        if self.batch.held:
            drafts = self.batch.drafts
        else:
            drafts = len(requests) == 1 or self.batch.steps.pads or not self.host.speculation.drafters
        return not drafts and any(request.params.speculate for request in requests)

    def _refusal(self, requests: Sequence[Request]) -> str | None:
        """Return why the host must run this step, or None."""
        if self._drafts_on_host(requests) and self.host.speculation.policy.plans_next:
            return PLANNED
        if len(requests) != len(self.host.scheduler.running) or not all(r.is_decoding for r in requests):
            return "prefill"
        if not all(request.chooser.runs_on_device for request in requests):
            return "penalties, biases, structured output or log-probabilities"
        if any(map(self.host.speculation.skips_draft, requests)):
            return "a token retried without a draft"
        return self.batch.steps.refusal(requests)

    def _is_interrupted(self) -> bool:
        """Return whether a request can be admitted now, or one was cancelled."""
        scheduler = self.host.scheduler
        has_room = len(scheduler.running) < scheduler.max_running and not (self._was_full and self._waiting)
        has_arrived = len(scheduler.waiting) != self._waiting and (has_room or scheduler.may_preempt())
        if scheduler.waiting and (now_s := time.monotonic()) >= self._next_turn_s:
            self._next_turn_s = now_s + PATIENCE_S
            has_arrived = has_arrived or scheduler.may_take_turn()
        return has_arrived or any(r.cancelled for r in (*scheduler.running, *scheduler.waiting))

    def _commit(self, read: BatchOutput, seconds: dict[str, float]) -> None:
        self.steps += 1
        self.host.counts().spend(seconds)
        rows = [_row(*row) for row in zip(read.requests, read.outcomes, strict=True)]
        paths = [self._path(*row, read.key) for row in zip(read.requests, read.outcomes, strict=True)]
        result = StepResult(rows, paths, read.committed, seconds, ahead=read.ahead)
        self.host.commit(result)
        self._note_free_rows(seconds.get("whole", 0.0))

    def _note_free_rows(self, step_s: float) -> None:
        """End the batch once idle rows have cost enough while requests wait."""
        scheduler, free = self.host.scheduler, len(self.batch.held) - len(self.batch.requests)
        if free > self._free:
            scheduler.connector.advance()
        self._free = free
        if not (free and scheduler.waiting):
            return
        now_s = time.monotonic()
        self._free_since_s = now_s if self._free_since_s is None else self._free_since_s
        self._idle_s += step_s * free / len(self.batch.held)
        is_late = now_s >= self._free_since_s + PATIENCE_S
        self._over |= is_late or self._idle_s >= RELOAD * self._load_s

    def _path(self, request: Request, outcome: RowResult, key: GraphKey) -> AcceptedPath:
        """Return the device's accepted path; it is empty if the logits at the root were NaN."""
        if outcome.nodes:
            return AcceptedPath(outcome.nodes, outcome.emitted)
        if key.nodes == 1:
            return AcceptedPath((0,), (NO_TOKEN,))
        # Another node may have caused the NaN, so the token is sampled again without a draft.
        self.host.speculation.skip_draft_once(request)
        self._over = True
        return AcceptedPath((), ())


def _row(request: Request, outcome: RowResult) -> ScheduledRequest:
    """Build the scheduled row of a finished step; the device has already released draft slots."""
    slots = () if len(outcome.tree) > 1 else None
    return ScheduledRequest(request, outcome.tree, is_decode=True, slots=slots)


class DeviceDraftRunner(Runner):
    """Runs steps that also draft on the device, launching each before the previous one is read.

    A `lazy` head is not run while nothing is drafted: its pending hidden states stay on the host.
    """

    def __init__(self, batch: DeviceBatch, host: RunnerHost, policy: UniformPolicy, *, lazy: bool) -> None:
        super().__init__(batch, host)
        self.policy, self.lazy = policy, lazy
        self.look_ups = HostLookups(host.speculation, policy) if host.speculation.looks else None
        self._found: dict[Request, DraftRecord] = {}
        """Look-up results verified in the next step, which the device did not draft."""
        self._first_passes = 0
        self._mark_s: float | None = None
        """Time of the last result; None: there is none yet."""
        self._shape: DraftShape | None = None
        """Shape of the windows verified next."""
        self._next: tuple[DraftShape | None] | None = None
        """Shape of the next step, if chosen before its windows were drafted."""
        self._asked: list[Request] = []
        """Requests for which it was chosen."""

    def _refusal(self, requests: Sequence[Request]) -> str | None:
        """Refuse batches in which only some rows may draft."""
        if self.policy.bounds and len({request.params.speculate for request in requests}) > 1:
            return "rows with and without drafts in one batch"
        return super()._refusal(requests)

    def abandon(self) -> None:
        """Drop the batch and the choices for its next step."""
        self._next, self._asked, self._found = None, [], {}
        super().abandon()

    def graph_keys(self) -> list[GraphKey]:
        """Return the keys of every shape, and of no draft, which requests may ask for."""
        keys = list(map(self._key, dict.fromkeys((None, *self.policy.shapes))))
        if self.look_ups and self.policy.bounds:
            keys += [key.finding(self.policy.bounds.num_draft_tokens) for key in keys]
        return list(dict.fromkeys(keys))

    def _key(self, shape: DraftShape | None) -> GraphKey:
        reads = shape is not None or not self.lazy
        return GraphKey.drafting(shape, reads=reads, filtered=self.batch.filtered)

    @property
    def outlook(self) -> DraftDecision | None:
        return self.policy.outlook

    def _reads(self, requests: Sequence[Request]) -> bool:
        if list(requests) != self._asked:
            self.policy.reconsider()
            self._next = None
        if self._next is None:
            self._next, self._asked = (self._choose(requests),), list(requests)
        return self._key(*self._next).reads

    def _start(self) -> None:
        assert self._next
        (self._shape,) = self._next
        self._mark_s = None
        self.batch.prefill_drafter(self._key(self._shape))

    def _choose(self, requests: Sequence[Request]) -> DraftShape | None:
        if self._drafts_on_host(requests) or not all(request.params.speculate for request in requests):
            return None
        return self.policy.choose([self.host.speculation.acceptance.of(request) for request in requests])

    def _advance(self) -> bool:
        requests = self.batch.requests
        if self._drafts_on_host(requests) and not self.host.speculation.skips_plan(requests):
            return False
        if self._next is None:
            self._asked = requests
            self._next = (self._choose(requests),)
        (shape,) = self._next
        key = self._key(shape)
        if self.batch.head and key.reads != self.batch.reads:
            return False  # reload with the head running, or idle
        self._next = None
        trees = self._look_up()
        if self._found and self.policy.bounds:
            key = key.finding(self.policy.bounds.num_draft_tokens)
        launched = self.batch.launch(key, trees=trees, as_drafted=shape == self._shape)
        self._shape = shape
        if launched and self.batch.is_full:
            self._read()
        return launched

    def _look_up(self) -> list[TokenTree | None]:
        """Return look-up trees for the rows where they have a higher expected gain."""
        requests, self._found = self.batch.requests, {}
        if (
            self.look_ups is None
            or self._drafts_on_host(requests)
            or not all(request.params.speculate for request in requests)
        ):
            return []
        records = zip(requests, self.look_ups.find(requests, self._shape), strict=True)
        self._found = {request: record for request, record in records if record}
        # Without drafting, windows still hold the previous look-up, so other rows are reset to their root.
        bare = None if self._shape else TokenTree((0,), (-1,))
        trees = [bare] * len(self.batch.held)
        for b, held in enumerate(self.batch.held):
            if self._found and held.request in requests:
                record = self._found.get(held.request)
                root = TokenTree.chain(held.request.tokens[-1:])
                trees[b] = record.merged.tree if record else bare and root
        return trees if self._found else []

    def _drain(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        read = self.batch.read()
        if read is None:
            return False
        now_s, before_s = self.host.speculation.clock(), self._mark_s
        self._mark_s = now_s
        seconds = {"whole": 0.0 if before_s is None else now_s - before_s}
        is_known = self.batch.arena.first_passes == self._first_passes
        self._first_passes = self.batch.arena.first_passes
        if before_s is not None and read.requests and is_known:
            if self._found:
                self.policy.observe_found(read.key.shape, len(read.requests), seconds["whole"])
            elif read.as_drafted:
                self.policy.observe(read.key.shape, len(read.requests), seconds["whole"])
        for request, outcome in zip(read.requests, read.outcomes, strict=True):
            record = self._found.get(request) or self._drafted(read, outcome)
            self.host.speculation.acceptance.note(request, record)
        self._found = {}
        self._commit(read, seconds)
        if not self.batch.reads:
            self.host.speculation.head_state.catch_up(self.batch.requests)
        if self._drafts_on_host(read.requests):
            self.host.speculation.observe_step([1] * len(read.requests), len(read.requests))
        return True

    def _drafted(self, read: BatchOutput, outcome: RowResult) -> DraftRecord | None:
        """Return the head's draft record of a window that was verified in its shape."""
        head, shape = self.host.speculation.head, read.key.shape
        if head is None or shape is None or outcome.proposal is None:
            return None
        return DraftRecord(shape, ((head, outcome.proposal),), outcome.proposal)


class HostDraftRunner(Runner):
    """Runs steps on the device with look-up drafts from the host, which reads each step before the next."""

    def __init__(self, batch: DeviceBatch, host: RunnerHost) -> None:
        super().__init__(batch, host)
        widest = batch.extent.nodes
        self._sizes = sorted({1, *(1 + nodes for nodes in WIDTHS if 1 + nodes < widest), widest})

    def graph_keys(self) -> list[GraphKey]:
        """Return the keys of all window widths."""
        return [GraphKey.given(nodes, filtered=self.batch.filtered) for nodes in self._sizes]

    def _reads(self, requests: Sequence[Request]) -> bool:
        return False

    def _start(self) -> None:
        """Do nothing: each step gets its windows from the host."""

    def _drain(self) -> None:
        """Do nothing: every step has been read."""

    def _advance(self) -> bool:
        clock, speculation, requests = PhaseTimer(), self.host.speculation, self.batch.requests
        self.host.scheduler.work.begin({})  # no work budget for these steps
        rows: list[ScheduledRequest] = []
        trees: list[TokenTree] = []
        nodes = 1
        if not speculation.skips_plan(requests):
            if self._drafts_on_host(requests):
                return False
            rows = [ScheduledRequest.of(request, 1) for request in requests]
            drafts = speculation.draft(rows, lend=lambda *_: ())
            rows = [row.with_draft(draft) for row, draft in zip(rows, drafts, strict=True)]
            tree_of = {row.request: row.tree for row in rows}
            padding = TokenTree((0,), (-1,))
            trees = [tree_of.get(held.request, padding) for held in self.batch.held]
            nodes = self._sizes[bisect_left(self._sizes, max(map(len, trees)))]
        clock.lap("draft")
        if not self.batch.launch(GraphKey.given(nodes, filtered=self.batch.filtered), trees=trees):
            return False
        read = self.batch.read()
        assert read is not None
        clock.lap("whole")
        self._commit(read, clock.seconds)
        widths = [row.num_tokens for row in rows] or [1] * len(requests)
        speculation.observe_step(widths, sum(widths))
        return True
