"""Draft planning: which drafters to ask, for which requests, and in what shape."""

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from specdec.core.acceptance_stats import AcceptanceStats, Experience
from specdec.core.batch import ScheduledRequest
from specdec.core.draft_record import Answer, DraftRecord, merged, want_of, widened
from specdec.core.head_state import HeadState
from specdec.core.ranker import Ranker
from specdec.core.request import Request
from specdec.core.scheduler import DRAFT_SLOTS, Scheduler
from specdec.draft.calibration import Assumed
from specdec.draft.drafter import Drafter
from specdec.draft.echo import Echo
from specdec.draft.head import HeadDrafter
from specdec.draft.lookup import MOST_INDEXED
from specdec.draft.policy import Batch, Policy
from specdec.draft.proposal import Proposal, Shape
from specdec.draft.rounded import RoundedDrafter
from specdec.draft.worth import Worth
from specdec.kernels.table import Kernels
from specdec.state_slots.backing import Backing, Draft
from specdec.state_slots.slots import RequestId

logger = logging.getLogger(__name__)

Lend = Callable[[RequestId, int], Sequence[Any] | None]
"""Gives an owner a number of slots, or None."""

MOST_LOOKED_UP = 32
"""Requests of several callers that are looked up per step, round-robin: each takes up to 1 ms of Python."""
CLOSE = 64
"""Tokens that drafters can catch up with while their time still is that of a draft."""


class Speculation:
    """Owns the drafters and the policy that picks shapes; plans and borrows the drafts of each step."""

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
        """Ranks what a head guesses."""
        self.drafters: list[Drafter] = []
        self.head_state = HeadState()
        self.planned: HeadDrafter | RoundedDrafter | None = None
        """The drafter that runs a network, for what was planned; all others look text up."""
        self.synthetic = synthetic
        """Rates by depth at which drafts are accepted whatever they say."""
        self.clock = clock
        """By which steps and drafts are compared, not by the time that callers wait."""
        self._mark_s = 0.0
        """When this step was drafted for."""
        self._took_s = 0.0
        """What that took."""
        self.learns = learns
        """Whether the choice of shapes has a use for what steps take."""
        self.acceptance = AcceptanceStats()
        self._told: dict[RequestId, int] = {}
        """How many of a request's tokens its drafters have read."""
        self._skips_draft: set[int] = set()
        self._echoes: dict[int, Echo] = {}
        self._looked_up = 0
        """Round-robin offset into the decoding requests."""

    def add_drafter(self, drafter: Drafter) -> None:
        """Ask this one too from now on."""
        self.drafters.append(drafter)
        if self.synthetic:
            drafter.calibrator = Assumed(self.synthetic)
        if isinstance(drafter, HeadDrafter):
            self.head_state.head = drafter
        if isinstance(drafter, HeadDrafter | RoundedDrafter):
            self.planned = drafter

    def draft_by(self, drafters: Sequence[Drafter], policy: Policy) -> None:
        """Ask these alone from now on, in the shapes of this policy."""
        self.drafters, self.policy = list(drafters), policy

    @property
    def head(self) -> HeadDrafter | None:
        """The drafter that reads the target's hidden states, if there is one."""
        return self.head_state.head

    @property
    def looks(self) -> bool:
        """Whether a drafter looks text up."""
        return any(drafter is not self.planned for drafter in self.drafters)

    def flush(self, caller: str | None = None) -> None:
        """Forget the texts of requests that have ended: all, or one caller's."""
        for drafter in self.drafters:
            drafter.flush(caller)

    def draft(self, rows: Sequence[ScheduledRequest], *, lend: Lend | None = None) -> list[Draft | None]:
        """Return each row's tree and its slots, or None where nothing was drafted that pays.

        Slots are borrowed from the backing, if `lend` has none.
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
        """Return whether a step goes without a plan, as most steps do while drafting does not pay.

        All its requests decode. Skipping is nearly free; every few steps it looks for repeated text.
        """
        self.acceptance.begin_step()
        if any(map(self.skips_draft, requests)):
            return False
        if self.policy.scans and self.looks:
            spare = MOST_INDEXED
            for own in requests:
                # Where a text repeats itself, a look-up would find what follows.
                echo = self._echoes.setdefault(own.number, Echo())
                before = echo.indexed
                if echo.repeats(own.tokens, spare):
                    self.policy.request_plan()
                spare -= echo.indexed - before
        if not self.policy.skips_plan():
            return False
        if not self.policy.is_idle:
            self.head_state.catch_up(requests)
            self._mark_s = self.clock()
        return True

    def _draft(self, rows: Sequence[ScheduledRequest], lend: Lend | None) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(rows)
        decoding = [i for i, row in enumerate(rows) if row.is_decode]
        if not self.drafters or not decoding:
            self.head_state.catch_up([row.request for row in rows])
            return drafts
        requests = [rows[i].request for i in decoding]
        batch = Batch(len(decoding), sum(row.num_tokens for row in rows))
        tracks = [self.acceptance.of(request) for request in requests]
        rooms = [self._room(request) for request in requests]
        self._skips_draft.difference_update(request.number for request in requests)
        answers: list[list[Answer]] = [[] for _ in requests]

        def look_up() -> list[Proposal]:
            self._look_up(requests, rooms, answers)
            return list(map(merged, requests, answers))

        grows = self.planned is not None
        planned = self.policy.plan(batch, tracks, rooms, look_up if self.looks else None, grows=grows)
        if not any(planned) and not any(proposal.num_drafted for own in answers for _, proposal in own):
            # As most steps are while nothing pays: what follows would take longer than the plan.
            self.head_state.catch_up([row.request for row in rows])
            self.policy.cut(batch, [])
            return drafts
        wanted = list(map(widened, planned, map(merged, requests, answers)))
        shapes = self._fitting(requests, planned, wanted, lends=lend is not None)
        self.head_state.catch_up([row.request for row in rows if not row.is_decode])
        self._ask(requests, [own and shape for own, shape in zip(planned, shapes, strict=True)], answers)
        wholes = self._merge(requests, planned, shapes, answers)
        for i, request, proposal in zip(decoding, requests, self.policy.cut(batch, wholes), strict=True):
            drafts[i] = self._borrow(request, proposal, lend or self.backing.begin)
            if self.synthetic and drafts[i] is None:
                self.acceptance.note(request, None)  # it was not put to the test
        return drafts

    def _room(self, request: Request) -> int:
        """Return how deep a draft for a request may be."""
        held = request.number in self._skips_draft or request.chooser.is_slow
        return 0 if held or not request.params.speculate else request.num_remaining_tokens - 1

    def look_up(self, requests: Sequence[Request]) -> list[list[Answer]]:
        """Return what each drafter that looks text up has found for each request."""
        answers: list[list[Answer]] = [[] for _ in requests]
        self._look_up(requests, [self._room(request) for request in requests], answers)
        return answers

    def _look_up(
        self, requests: Sequence[Request], rooms: Sequence[int], answers: Sequence[list[Answer]]
    ) -> None:
        """Ask the look-ups, as deep as can be verified: they take next to no time."""
        tokens, topk = self.policy.bounds.num_draft_tokens, self.policy.bounds.topk
        depths = [min(tokens - 1, room) for room in rooms]
        if len(requests) > MOST_LOOKED_UP and len({own.tenant.flow[0] for own in requests}) > 1:
            self._looked_up += MOST_LOOKED_UP
            first = self._looked_up % len(requests)
            taken = {(first + i) % len(requests) for i in range(MOST_LOOKED_UP)}
            depths = [depth if i in taken else 0 for i, depth in enumerate(depths)]
        wants = [
            want_of(request, Shape(depth, topk, tokens) if depth > 0 else None)
            for request, depth in zip(requests, depths, strict=True)
        ]
        for drafter in self.drafters:
            if drafter is not self.planned:
                for own, proposal in zip(answers, drafter.propose(wants), strict=True):
                    own.append((drafter, proposal))

    def _ask(
        self,
        requests: Sequence[Request],
        shapes: Sequence[Shape | None],
        answers: Sequence[list[Answer]],
    ) -> None:
        """Ask the drafters that have not answered yet for drafts in these shapes."""
        wanted = [i for i, shape in enumerate(shapes) if shape or self.head_state.is_full(requests[i])]
        if not wanted:
            return
        wants = [want_of(requests[i], shapes[i]) for i in wanted]
        lengths = {requests[i].number: len(want.tokens) for i, want in zip(wanted, wants, strict=True)}
        caught_up = self.planned is not self.head  # what drafts from the sequence's own memory always is
        behind = (
            0 if caught_up else max(length - self._told.get(number, 0) for number, length in lengths.items())
        )
        self._told |= lengths
        silent = [drafter for drafter in self.drafters if drafter is self.planned or not any(answers)]
        start_s, first_passes = self.clock(), self.backing.arena.first_passes
        for drafter in silent:
            for i, proposal in zip(wanted, drafter.propose(wants), strict=True):
                answers[i].append((drafter, proposal))
        took_s = self.clock() - start_s
        asked = [shapes[i] for i in wanted]
        alike = len({shape and (shape.topk, shape.num_steps) for shape in asked}) == 1
        is_known = self.backing.arena.first_passes == first_passes
        shape = asked[0] if alike and behind <= CLOSE and is_known else None
        self.policy.observe_draft(shape, len(wanted), took_s)

    def _merge(
        self,
        requests: Sequence[Request],
        planned: Sequence[Shape | None],
        shapes: Sequence[Shape | None],
        answers: Sequence[list[Answer]],
    ) -> list[Proposal]:
        """Make one proposal of all answers for each request, as large as there is room for."""
        wholes = []
        for request, plan, shape, own in zip(requests, planned, shapes, answers, strict=True):
            proposal = (
                merged(request, own, shape.num_draft_tokens) if shape else Proposal.bare(request.tokens[-1])
            )
            if shape and own:
                self.acceptance.note(request, DraftRecord(plan, tuple(own), proposal))
            wholes.append(proposal)
        return wholes

    def _fitting(
        self,
        requests: Sequence[Request],
        planned: Sequence[Shape | None],
        shapes: Sequence[Shape | None],
        *,
        lends: bool,
    ) -> list[Shape | None]:
        """Lower what is asked for to the memory there is, before drafts are made that find no slots.

        With several callers, drafts that exceed the step's work budget are skipped.
        """
        fitting: list[Shape | None] = []
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

    def _has_time(self, request: Request, shape: Shape, *, grown: bool) -> bool:
        """Count the tokens that a draft and its verification compute, if the step has time for them.

        A network that grows a tree computes all of it anew at each level.
        """
        depth, tokens = shape.num_steps, shape.num_draft_tokens - 1
        if grown:
            tokens += depth if shape.topk == 1 else shape.topk * depth * (depth - 1) // 2
        return self.scheduler.work.fits(request.tenant.flow[0], tokens, request.num_computed_tokens)

    def _reserve(self, request: Request, shape: Shape) -> bool:
        """Get KV blocks for the window and for all that a network reads while it drafts."""
        positions = max(shape.num_draft_tokens, shape.topk * shape.num_steps)
        return self.scheduler.reserve(request, request.num_computed_tokens + positions)

    def _borrow(self, request: Request, proposal: Proposal, lend: Lend) -> Draft | None:
        """Take a slot for each node; where there are too few, shrink the draft before a request must wait."""
        while proposal.num_drafted:
            slots = lend(request.number, len(proposal.tree))
            if slots is not None:
                return Draft(proposal.tree, slots)
            self.scheduler.limited_by[DRAFT_SLOTS] += 1
            proposal = proposal.best(1 + proposal.num_drafted // 2)
        return None

    def observe_step(self, widths: Sequence[int], tokens: int) -> None:
        """Learn what a step has taken since it was drafted for; `widths` are those of the decoding rows."""
        if self.learns and widths and not self.policy.is_idle:
            took_s, groups = self.clock() - self._mark_s, len(set(widths))
            self.policy.observe_step(
                len(widths), tokens, took_s, self.acceptance.gained, self._took_s, groups=groups
            )

    def forget_requests(self) -> None:
        """Forget all requests, whatever was half done; those that go on are drafted for anew."""
        for known in (self._told, self._skips_draft, self._echoes):
            known.clear()
        self.acceptance.forget_requests()
        for drafter in self.drafters:
            drafter.forget()

    def experience(self) -> Experience:
        """Copy what was accepted so far."""
        tallies = tuple(deepcopy(drafter.calibrator.tallies) for drafter in self.drafters)
        return Experience(self.acceptance.kinds(), tallies, replace(self.policy.worth))

    def recall(self, experience: Experience | None) -> None:
        """Go on as after this experience, whatever has come since; None: as if nothing was accepted yet."""
        self.acceptance.recall(experience.kinds if experience else {})
        self.policy.recall(experience.worth if experience else Worth())
        for i, drafter in enumerate(self.drafters):
            if experience:
                drafter.calibrator.recall(experience.tallies[i])
            else:
                drafter.calibrator.forget()

    def skip_draft_once(self, request: Request) -> None:
        """Decode a request without a draft in the next step: its last draft made the target's numbers NaN."""
        self._skips_draft.add(request.number)

    def skips_draft(self, request: Request) -> bool:
        """Return whether its next token is to be tried without a draft."""
        return request.number in self._skips_draft

    def on_preempt(self, request: Request) -> None:
        """Forget what lay in a request's memory, which went back to the arena."""
        self._told.pop(request.number, None)
        for drafter in self.drafters:
            drafter.on_preempt(request.number)

    def end(self, request: Request, *, shared: bool = True) -> None:
        """Forget an ended request; its output serves the tenant's later ones if `shared`."""
        self.acceptance.end(request)
        self._told.pop(request.number, None)
        self._skips_draft.discard(request.number)
        self._echoes.pop(request.number, None)
        output = request.tokens[request.prompt_length :] if request.finish_reason and shared else None
        for drafter in self.drafters:
            drafter.end(request.number, request.tokens[: request.prompt_length], output, request.tenant)
