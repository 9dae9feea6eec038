"""Draft planning: which drafters run, for which requests, and in what shape."""

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from specdec.core.acceptance_stats import AcceptanceSnapshot, AcceptanceStats
from specdec.core.batch import ScheduledRequest
from specdec.core.draft_record import Answer, DraftRecord, merged, want_of, widened
from specdec.core.head_state import HeadState
from specdec.core.ranker import Ranker
from specdec.core.request import Request
from specdec.core.scheduler import DRAFT_SLOTS, Scheduler
from specdec.draft.calibration import AssumedRates
from specdec.draft.drafter import Drafter
from specdec.draft.head import HeadDrafter
from specdec.draft.lookup import MOST_INDEXED
from specdec.draft.policy import Policy, StepBatch
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.repetition import RepetitionIndex
from specdec.draft.rounded import RoundedDrafter
from specdec.draft.worth import DraftWorth
from specdec.kernels.table import Kernels
from specdec.state_slots.backing import Backing, DraftSlots
from specdec.state_slots.slots import RequestId

logger = logging.getLogger(__name__)

Lend = Callable[[RequestId, int], Sequence[Any] | None]
"""Takes a number of slots for an owner, or returns None."""

MOST_LOOKED_UP = 32
"""Look-ups per step when several callers run, round-robin: each takes up to 1 ms of Python."""
CLOSE = 64
"""Maximum tokens of catching up in a step whose time still counts as that of a draft."""


class Speculation:
    """Owns the drafters and the shape policy; plans each step's drafts and borrows their slots."""

    def __init__(
        self,
        policy: Policy,
        backing: Backing,
        scheduler: Scheduler,
        kernels: Kernels,
        *,
        synthetic: Sequence[float] | None = None,
        noise: bool = True,
        learns: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.policy, self.backing, self.scheduler = policy, backing, scheduler
        self.ranker = Ranker(kernels, noise=noise)
        """Ranks a network's guesses."""
        self.drafters: list[Drafter] = []
        self.head_state = HeadState()
        self.planned: HeadDrafter | RoundedDrafter | None = None
        """The drafter that runs a network, in planned shapes; all others are look-ups."""
        self.synthetic = synthetic
        """Fixed acceptance rates by depth, whatever is drafted; None: drafts are verified."""
        self.clock = clock
        """Clock for comparing steps and drafts, not for callers' waiting time."""
        self._mark_s = 0.0
        """Time at which this step's drafting ended."""
        self._took_s = 0.0
        """Seconds of this step's drafting."""
        self.learns = learns
        """Whether the policy uses measured step times."""
        self.acceptance = AcceptanceStats()
        self._told: dict[RequestId, int] = {}
        """Number of each request's tokens that its drafters have processed."""
        self._skips_draft: set[int] = set()
        self._echoes: dict[int, RepetitionIndex] = {}
        self._looked_up = 0
        """Round-robin offset into the decode requests."""

    def add_drafter(self, drafter: Drafter) -> None:
        """Add a drafter."""
        self.drafters.append(drafter)
        if self.synthetic:
            drafter.calibrator = AssumedRates(self.synthetic)
        if isinstance(drafter, HeadDrafter):
            self.head_state.head = drafter
        if isinstance(drafter, HeadDrafter | RoundedDrafter):
            self.planned = drafter

    def draft_by(self, drafters: Sequence[Drafter], policy: Policy) -> None:
        """Use only these drafters and this policy from now on."""
        self.drafters, self.policy = list(drafters), policy

    @property
    def head(self) -> HeadDrafter | None:
        """The drafter over the target's hidden states, or None."""
        return self.head_state.head

    @property
    def looks(self) -> bool:
        """Whether there is a look-up drafter."""
        return any(drafter is not self.planned for drafter in self.drafters)

    def flush(self, caller: str | None = None) -> None:
        """Drop texts of ended requests: all, or one caller's."""
        for drafter in self.drafters:
            drafter.flush(caller)

    def draft(self, rows: Sequence[ScheduledRequest], *, lend: Lend | None = None) -> list[DraftSlots | None]:
        """Return each row's draft with its slots, or None.

        Slots come from `lend`, or from the backing if it is None.
        """
        if all(row.is_decode for row in rows) and self.skips_plan([row.request for row in rows]):
            return [None] * len(rows)
        self.acceptance.begin_step()
        start_s = self.clock()
        drafts = self._draft(rows, lend)
        self._mark_s = self.clock()
        self._took_s = self._mark_s - start_s
        if new := sum(not row.is_decode and bool(row.sample_at) for row in rows):
            self.policy.on_new_rows(new / len(rows))
        return drafts

    def skips_plan(self, requests: Sequence[Request]) -> bool:
        """Return whether a step skips planning, as most do while drafting does not pay.

        All its requests must decode. Skipping costs little; every few steps it checks for repeated text.
        """
        self.acceptance.begin_step()
        if any(map(self.skips_draft, requests)):
            return False
        if self.policy.scans and self.looks:
            spare = MOST_INDEXED
            for request in requests:
                # In repeated text a look-up finds a continuation.
                echo = self._echoes.setdefault(request.number, RepetitionIndex())
                before = echo.indexed
                if echo.repeats(request.tokens, spare):
                    self.policy.request_plan()
                spare -= echo.indexed - before
        if not self.policy.skips_plan():
            return False
        if not self.policy.is_idle:
            self.head_state.catch_up(requests)
            self._mark_s = self.clock()
        return True

    def _draft(self, rows: Sequence[ScheduledRequest], lend: Lend | None) -> list[DraftSlots | None]:
        drafts: list[DraftSlots | None] = [None] * len(rows)
        decoding = [i for i, row in enumerate(rows) if row.is_decode]
        if not self.drafters or not decoding:
            self.head_state.catch_up([row.request for row in rows])
            return drafts
        requests = [rows[i].request for i in decoding]
        batch = StepBatch(len(decoding), sum(row.num_tokens for row in rows))
        tracks = [self.acceptance.of(request) for request in requests]
        rooms = [self._room(request) for request in requests]
        self._skips_draft.difference_update(request.number for request in requests)
        answers: list[list[Answer]] = [[] for _ in requests]

        def look_up() -> list[Proposal]:
            self._look_up(requests, rooms, answers)
            return list(map(merged, requests, answers))

        grows = self.planned is not None
        planned = self.policy.plan(batch, tracks, rooms, look_up if self.looks else None, grows=grows)
        if not any(planned) and not any(proposal.num_drafted for answer in answers for _, proposal in answer):
            # The common case while drafting does not pay; the code below would take longer than the plan.
            self.head_state.catch_up([row.request for row in rows])
            self.policy.cut(batch, [])
            return drafts
        wanted = list(map(widened, planned, map(merged, requests, answers)))
        shapes = self._fitting(requests, planned, wanted, lends=lend is not None)
        self.head_state.catch_up([row.request for row in rows if not row.is_decode])
        self._run_drafters(
            requests, [plan and shape for plan, shape in zip(planned, shapes, strict=True)], answers
        )
        wholes = self._merge(requests, planned, shapes, answers)
        for i, request, proposal in zip(decoding, requests, self.policy.cut(batch, wholes), strict=True):
            drafts[i] = self._borrow(request, proposal, lend or self.backing.begin)
            if self.synthetic and drafts[i] is None:
                self.acceptance.note(request, None)  # it was not verified
        return drafts

    def _room(self, request: Request) -> int:
        """Return the maximum draft depth for a request."""
        held = request.number in self._skips_draft or request.chooser.is_slow
        return 0 if held or not request.params.speculate else request.num_remaining_tokens - 1

    def look_up(self, requests: Sequence[Request]) -> list[list[Answer]]:
        """Return each look-up drafter's proposal for each request."""
        answers: list[list[Answer]] = [[] for _ in requests]
        self._look_up(requests, [self._room(request) for request in requests], answers)
        return answers

    def _look_up(
        self, requests: Sequence[Request], rooms: Sequence[int], answers: Sequence[list[Answer]]
    ) -> None:
        """Run the look-up drafters, to the maximum depth that can be verified: they are cheap."""
        tokens, topk = self.policy.bounds.num_draft_tokens, self.policy.bounds.topk
        depths = [min(tokens - 1, room) for room in rooms]
        if len(requests) > MOST_LOOKED_UP and len({request.tenant.flow[0] for request in requests}) > 1:
            self._looked_up += MOST_LOOKED_UP
            first = self._looked_up % len(requests)
            selected = {(first + i) % len(requests) for i in range(MOST_LOOKED_UP)}
            depths = [depth if i in selected else 0 for i, depth in enumerate(depths)]
        draft_requests = [
            want_of(request, DraftShape(depth, topk, tokens) if depth > 0 else None)
            for request, depth in zip(requests, depths, strict=True)
        ]
        for drafter in self.drafters:
            if drafter is not self.planned:
                for answer, proposal in zip(answers, drafter.propose(draft_requests), strict=True):
                    answer.append((drafter, proposal))

    def _run_drafters(
        self,
        requests: Sequence[Request],
        shapes: Sequence[DraftShape | None],
        answers: Sequence[list[Answer]],
    ) -> None:
        """Run the drafters that have no proposal yet, in these shapes."""
        wanted = [i for i, shape in enumerate(shapes) if shape or self.head_state.is_full(requests[i])]
        if not wanted:
            return
        draft_requests = [want_of(requests[i], shapes[i]) for i in wanted]
        lengths = {
            requests[i].number: len(draft_request.tokens)
            for i, draft_request in zip(wanted, draft_requests, strict=True)
        }
        caught_up = self.planned is not self.head  # drafters on the sequence's own memory never fall behind
        backlog = (
            0 if caught_up else max(length - self._told.get(number, 0) for number, length in lengths.items())
        )
        self._told |= lengths
        silent = [drafter for drafter in self.drafters if drafter is self.planned or not any(answers)]
        start_s, first_passes = self.clock(), self.backing.arena.first_passes
        for drafter in silent:
            for i, proposal in zip(wanted, drafter.propose(draft_requests), strict=True):
                answers[i].append((drafter, proposal))
        took_s = self.clock() - start_s
        requested = [shapes[i] for i in wanted]
        is_uniform = len({shape and (shape.topk, shape.num_steps) for shape in requested}) == 1
        is_known = self.backing.arena.first_passes == first_passes
        shape = requested[0] if is_uniform and backlog <= CLOSE and is_known else None
        self.policy.observe_draft(shape, len(wanted), took_s)

    def _merge(
        self,
        requests: Sequence[Request],
        planned: Sequence[DraftShape | None],
        shapes: Sequence[DraftShape | None],
        answers: Sequence[list[Answer]],
    ) -> list[Proposal]:
        """Merge each request's proposals, cut to its shape."""
        wholes = []
        for request, plan, shape, answer in zip(requests, planned, shapes, answers, strict=True):
            proposal = (
                merged(request, answer, shape.num_draft_tokens)
                if shape
                else Proposal.bare(request.tokens[-1])
            )
            if shape and answer:
                self.acceptance.note(request, DraftRecord(plan, tuple(answer), proposal))
            wholes.append(proposal)
        return wholes

    def _fitting(
        self,
        requests: Sequence[Request],
        planned: Sequence[DraftShape | None],
        shapes: Sequence[DraftShape | None],
        *,
        lends: bool,
    ) -> list[DraftShape | None]:
        """Cut shapes to the available slots and blocks before drafting.

        With several callers, drafts that exceed the step's work budget are skipped.
        """
        fitting: list[DraftShape | None] = []
        nodes = 0
        for request, plan, shape in zip(requests, planned, shapes, strict=True):
            while shape and not (lends or self.backing.has_room(nodes + shape.num_draft_tokens)):
                self.scheduler.limited_by[DRAFT_SLOTS] += 1
                shape = shape.within(shape.num_draft_tokens // 2)
            if shape and not self._has_time(request, shape, grown=plan is not None):
                shape = None
            fitting.append(shape if shape and self._reserve(request, shape) else None)
            nodes += shape.num_draft_tokens if fitting[-1] and shape else 0
        return fitting

    def _has_time(self, request: Request, shape: DraftShape, *, grown: bool) -> bool:
        """Charge a draft and its verification to the work budget; return False if they do not fit.

        A network that grows a tree recomputes it at each level.
        """
        depth, tokens = shape.num_steps, shape.num_draft_tokens - 1
        if grown:
            tokens += depth if shape.topk == 1 else shape.topk * depth * (depth - 1) // 2
        return self.scheduler.work.fits(request.tenant.flow[0], tokens, request.num_computed_tokens)

    def _reserve(self, request: Request, shape: DraftShape) -> bool:
        """Reserve KV blocks for the window and for all positions that drafting writes."""
        positions = max(shape.num_draft_tokens, self.head.written(shape) if self.head else 0)
        return self.scheduler.reserve(request, request.num_computed_tokens + positions)

    def _borrow(self, request: Request, proposal: Proposal, lend: Lend) -> DraftSlots | None:
        """Borrow a slot per node; if there are too few, shrink the draft."""
        while proposal.num_drafted:
            slots = lend(request.number, len(proposal.tree))
            if slots is not None:
                return DraftSlots(proposal.tree, slots)
            self.scheduler.limited_by[DRAFT_SLOTS] += 1
            proposal = proposal.best(1 + proposal.num_drafted // 2)
        return None

    def observe_step(self, widths: Sequence[int], tokens: int) -> None:
        """Record a step's time since drafting; `widths` are those of the decode rows."""
        if self.learns and widths and not self.policy.is_idle:
            took_s, groups = self.clock() - self._mark_s, len(set(widths))
            self.policy.observe_step(
                len(widths), tokens, took_s, self.acceptance.gained, self._took_s, groups=groups
            )

    def forget_requests(self) -> None:
        """Drop all requests, including unfinished ones; live ones are drafted from scratch."""
        for table in (self._told, self._skips_draft, self._echoes):
            table.clear()
        self.acceptance.forget_requests()
        for drafter in self.drafters:
            drafter.forget()

    def experience(self) -> AcceptanceSnapshot:
        """Return a copy of the acceptance statistics."""
        tallies = tuple(deepcopy(drafter.calibrator.tallies) for drafter in self.drafters)
        return AcceptanceSnapshot(self.acceptance.kinds(), tallies, replace(self.policy.worth))

    def recall(self, experience: AcceptanceSnapshot | None) -> None:
        """Restore earlier acceptance statistics; None: the initial ones."""
        self.acceptance.recall(experience.kinds if experience else {})
        self.policy.recall(experience.worth if experience else DraftWorth())
        for i, drafter in enumerate(self.drafters):
            if experience:
                drafter.calibrator.recall(experience.tallies[i])
            else:
                drafter.calibrator.forget()

    def skip_draft_once(self, request: Request) -> None:
        """Skip the draft in a request's next step: its last draft led to NaN, or a mask came too late."""
        self._skips_draft.add(request.number)

    def skips_draft(self, request: Request) -> bool:
        """Return whether its next step must run without a draft."""
        return request.number in self._skips_draft

    def on_preempt(self, request: Request) -> None:
        """Drop drafter data in a preempted request's memory."""
        self._told.pop(request.number, None)
        for drafter in self.drafters:
            drafter.on_preempt(request.number)

    def end(self, request: Request, *, shared: bool = True) -> None:
        """Drop an ended request; with `shared` its output is kept for the tenant's later requests."""
        self.acceptance.end(request)
        self._told.pop(request.number, None)
        self._skips_draft.discard(request.number)
        self._echoes.pop(request.number, None)
        output = request.tokens[request.prompt_length :] if request.finish_reason and shared else None
        for drafter in self.drafters:
            drafter.end(request.number, request.tokens[: request.prompt_length], output, request.tenant)
