"""Adaptive draft shapes, chosen each step from measured step costs and draft acceptance.

There are two decisions per step. Before drafting, each request's acceptance rates decide whether a draft
pays, how deep, and for which rows. After drafting, the nodes' scores decide how many nodes to verify in each
row (`widths.py`).

Both estimates are checked against what steps really gained (`worth.py`). Where the gain is less than the cost
of planning, drafting and wider steps, steps are planned only within a budget of a hundredth of the time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import STALE, Costs, Work
from specdec.draft.decision import DraftDecision
from specdec.draft.proposal import DraftShape, Proposal
from specdec.draft.widths import MARGIN, Curve, WidthCut, best_cut, counts, gains, highest, rate
from specdec.draft.worth import DraftWorth, ProbeBudget

PROBE_SHARE, LOOKUP_SHARE, TRIAL_SHARE = 0.003, 0.004, 0.005
"""Shares of the time for probes, which are drafts not expected to pay; for plans and look-ups while these
have not paid; and for trials on new rows, in addition to what drafts have earned."""

REFRESH, TIMES = STALE + 50, 3
"""After `REFRESH` steps with drafts, run `TIMES` without, to measure their cost again."""
HICCUP = 3.0
"""A measured time counts as at most this many times the expected one; the rest is an outlier."""
JUDGED = 64
"""Number of steps without drafts over which their average time is taken."""
SCANNED = 8
"""While plans are off, one step in this many checks for repeated text."""
CHANGED = 0.125
"""Fraction of a batch that must be new before this alone causes a plan. With any change, one short request
among 250 rows caused four planned steps: a fifth of all tokens/s of a server with three keys."""
MEASURED = 16
"""While plans are off, one step in this many is measured, to follow the machine's pace."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The part of a step that does not depend on drafts."""

    rows: int
    """Number of decode rows."""
    tokens: int
    """One per decode row, plus the tokens of prefill rows."""


@dataclass(frozen=True, slots=True)
class ShapePick:
    """The best shape, the rows that draft in it if it pays, and its expected tokens and seconds."""

    rows: set[int]
    shape: DraftShape
    tokens: float
    seconds: float


@dataclass(slots=True)
class DraftPlan:
    """One step's plan and its measurements so far."""

    shape: DraftShape
    """Shape in which rows draft."""
    batch: StepBatch | None = None
    """The step's work without drafts; None: the step is not used to judge drafts."""
    used: tuple[ProbeBudget, ...] = ()
    """Budgets charged while drafts do not pay."""
    probe: float = 0.0
    """Fraction of the drafting that is a probe."""
    probed_row: int | None = None
    """Row that is probed while others draft: its draft is scored but not verified."""
    tries: bool = False
    """Whether the step verifies nodes that are not expected to pay."""
    draft_s: float = 0.0
    """Seconds of drafting."""
    behind_s: float = 0.0
    """Seconds in which a head caught up."""


class Policy:
    """Choose draft shapes within `bounds`; if not adaptive, always the bounds."""

    def __init__(
        self,
        bounds: DraftShape,
        *,
        adaptive: bool,
        mixed: bool = True,
        work: Work = float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.bounds, self.adaptive, self.clock = bounds, adaptive, clock
        self.mixed = mixed
        """Whether rows may verify drafts of several widths in one step."""
        self.steps = Costs(work)
        """Cost of verify steps, by tokens."""
        self.drafts = {topk: Costs() for topk in {1, bounds.topk}}
        """Cost of drafts by levels, relative to the pace of steps: chains, and trees of the bounds' topk."""
        self.worth = DraftWorth()
        self.probe_budget, self.lookup_budget = ProbeBudget(PROBE_SHARE), ProbeBudget(LOOKUP_SHARE)
        self.trial_budget = ProbeBudget(TRIAL_SHARE)
        self.outlook = None if adaptive else DraftDecision(drafts=True, shape=bounds)
        """Result of the last plan."""
        self.current = DraftPlan(bounds)
        """The current or last plan."""
        self._plans = 0
        self._drafted = 0
        """Steps since the last one without a draft."""
        self._typical = 1.0
        """Mean time of steps without drafts, relative to their lower quartile."""
        self._was_plain = True
        """Whether the last step had no draft; folding accepted drafts is part of the next step's cost."""
        self._noting_s = 0.0
        """Seconds to process the measurements of a step."""
        self._skipped = self._to_skip = 0
        """Number of steps skipped since the last plan, and number to skip."""
        self._plan_requested = True
        self._new = 0.0
        """Fraction of new rows since the last plan for new rows."""
        deepest = min(bounds.num_steps, bounds.num_draft_tokens - 1)
        chains = tuple(DraftShape(depth, 1, depth + 1) for depth in range(1, deepest + 1))
        self.shapes = chains if bounds.topk == 1 else (*chains, bounds)

    def of_shape(self, shape: DraftShape | None, *, drafts: bool) -> "Policy":
        """Return a policy with a fixed shape that shares this one's step costs.

        With `drafts` it shares the draft costs too.
        """
        other = Policy(shape or self.bounds, adaptive=False)
        other.steps = self.steps
        if drafts:
            other.drafts = self.drafts
        return other

    def recall(self, worth: DraftWorth) -> None:
        """Start from a copy of this worth."""
        self.worth = replace(worth)

    def on_new_rows(self, part: float) -> None:
        """Record the fraction of the next batch that decodes for the first time."""
        self._new += part

    @property
    def _is_new(self) -> bool:
        """Whether enough of the batch is new to plan for it, within the trial budget."""
        return self._new >= CHANGED and self.trial_budget.may_overdraw(self._skipped)

    def request_plan(self) -> None:
        """Plan the next step, since a look-up may succeed, unless such hints have failed too often."""
        self._plan_requested = self._plan_requested or self.lookup_budget.may_overdraw(self._skipped)

    @property
    def plans_next(self) -> bool:
        """Whether the next step is planned; while drafting does not pay, most are not."""
        is_due = self._skipped >= self._to_skip or self._plan_requested or self._is_new
        return is_due or self.worth.active or not self.adaptive

    def skips_plan(self) -> bool:
        """Return whether this step skips planning, and count it if so."""
        if self.plans_next:
            return False
        self._skipped += 1
        self._drop_plan()
        return True

    @property
    def scans(self) -> bool:
        """Whether this step checks for repeated text."""
        return not self.worth.active and self._skipped % SCANNED == 0

    @property
    def is_idle(self) -> bool:
        """Whether this step is neither planned nor measured."""
        return self.current.batch is None and self._skipped % MEASURED > 0

    def _drop_plan(self) -> None:
        """Discard a plan without judging it: its step ran a code path for the first time."""
        if self.current.batch and self.current.probe:
            self.probe_budget.spend(HICCUP)
        self.current.batch = None

    def observe_draft(self, shape: DraftShape | None, rows: int, seconds: float) -> None:
        """Record the time of drafting a shape for `rows`; None: mixed shapes, or it includes catching up."""
        if shape:
            self.drafts[shape.topk].observe(rows, shape.num_steps, seconds / self.steps.pace)
        # Outliers and catching up are excluded from the cost of a draft.
        plan = self.current
        plan.draft_s = min(seconds, HICCUP * self._drafting_s(shape or plan.shape, rows))
        plan.behind_s = 0.0 if shape else seconds - plan.draft_s

    def observe_step(
        self,
        rows: int,
        tokens: int,
        seconds: float,
        gained: int = 0,
        drafting_s: float = 0.0,
        *,
        groups: int = 1,
    ) -> None:
        """Record a step's time without its drafting, which took `drafting_s` from its plan to its cut.

        The step yielded `gained` tokens beyond one per row; its rows had `groups` widths.
        """
        planned, self.current.batch = self.current.batch, None
        is_plain = planned is None or tokens == planned.tokens
        start_s = self.clock()
        self.steps.observe(rows, tokens, seconds, groups)
        expected_s = self.steps.predict(rows, tokens, groups)
        seconds = min(seconds, HICCUP * expected_s)
        if planned:
            self._judge(self.current, planned, seconds, gained, drafting_s)
        if is_plain and self._was_plain and expected_s:
            self._typical += (seconds / expected_s - self._typical) / JUDGED
        self._was_plain = is_plain
        self._noting_s = self.clock() - start_s

    def _judge(
        self, plan: DraftPlan, batch: StepBatch, seconds: float, gained: int, drafting_s: float
    ) -> None:
        """Compare a planned step's gain with its whole cost, and update the trust in drafts."""
        plain_s = self._typical * self.steps.predict(batch.rows, batch.tokens)
        if plain_s <= 0:  # a line fitted to few samples may fall to zero
            return
        used = (drafting_s - plan.behind_s + self._noting_s) / plain_s
        drafts, backlog, longer = plan.draft_s / plain_s, plan.behind_s / plain_s, seconds / plain_s - 1
        is_probe = plan.probe == 1 or plan.tries
        if self.worth.active and is_probe:
            # Probes have their own budget, and are no evidence about regular drafts.
            self.worth.note(drafts - used)
            self.probe_budget.spend(backlog + plan.probe * drafts + max(longer, 0.0) * plan.tries)
        elif self.worth.active:
            net = gained / batch.rows - used + plan.probe * drafts - longer
            self.worth.note(net)
            self.probe_budget.spend(plan.probe * drafts)
            self.trial_budget.spend(-max(net, 0.0))
        else:
            net = gained / batch.rows - used - longer
            self.worth.note(net)
            (self.probe_budget if is_probe else self.lookup_budget).spend(backlog + max(-net, 0.0))
        waits = [budget.wait() for budget in plan.used]
        self._skipped, self._to_skip = 0, min(waits, default=1) - 1

    def plan(
        self,
        batch: StepBatch,
        rows: Sequence[TrackRecord],
        room: Sequence[int],
        look_up: Callable[[], Sequence[Proposal]] | None = None,
        *,
        grows: bool = True,
    ) -> list[DraftShape | None]:
        """Return each row's draft shape or None; `room` is the number of tokens a row may still output.

        The results of `look_up` are free, so drafting must gain more than they would alone. `look_up` is not
        called in steps without drafts. With `grows` false, only look-ups are used. If no row has room,
        nothing is planned.
        """
        self._drop_plan()
        plan = self.current = DraftPlan(self.current.shape)
        self._plans += 1
        if not self.adaptive:
            return [_within(self.bounds, deep) for deep in room]
        if not any(deep > 0 for deep in room) or self._refreshes():
            return [None] * len(room)
        if self._is_new:
            self.trial_budget.spend(self.worth.lend())
            self._new, self._plan_requested = 0.0, True
        was_requested, self._plan_requested = self._plan_requested, False
        if not was_requested and self.skips_plan():
            return [None] * len(room)
        none_s = self.steps.predict(batch.rows, batch.tokens)
        passed, self._skipped = 1 + self._skipped, 0
        plan.used = (*([self.lookup_budget] if look_up else []), *([self.probe_budget] if grows else []))
        for budget in (self.lookup_budget, self.probe_budget, self.trial_budget):
            budget.earn(passed)
        lookups = [[0.0]] * len(room)
        if look_up and (self.worth.active or was_requested or self.lookup_budget.is_open):
            lookups = [gains(proposal) for proposal in look_up()]
        lookup_cut = self._best_cut(batch, lookups)
        drafting, plan.shape = set[int](), self.shapes[0]
        pick: ShapePick | None = None
        if grows and (self.worth.active or self.probe_budget.is_open):
            pick = self._best(batch, rows, room, lookups, lookup_cut)
            drafting, plan.shape = (pick.rows if self.worth.active else set()), pick.shape
            free = [0 if width else deep for width, deep in zip(lookup_cut.widths, room, strict=True)]
            self._probe(plan, drafting, rows, free)
        for i, row in enumerate(rows):
            if i in drafting:
                row.planned = self._plans
            else:
                row.decay(passed)
        self._note_outlook(batch, none_s, lookup_cut, pick)
        plan.batch = batch if none_s else None
        return [_within(plan.shape, deep) if i in drafting else None for i, deep in enumerate(room)]

    def _refreshes(self) -> bool:
        """Return whether this step runs without drafts, to measure the cost of such steps again."""
        if self._drafted < REFRESH:
            return False
        self._drafted = self._drafted + 1 if self._drafted < REFRESH + TIMES - 1 else 0
        return True

    def _probe(
        self, plan: DraftPlan, drafting: set[int], rows: Sequence[TrackRecord], room: Sequence[int]
    ) -> None:
        """Add the row whose last plan is oldest, if the probe budget is open and one has room."""
        resting = [i for i, deep in enumerate(room) if deep > 0 and i not in drafting]
        if resting and self.probe_budget.is_open:
            probed = min(resting, key=lambda i: rows[i].planned)
            plan.probe, plan.probed_row = 1 / (1 + len(drafting)), probed if drafting else None
            drafting.add(probed)

    def _note_outlook(self, batch: StepBatch, none_s: float, alone: WidthCut, pick: ShapePick | None) -> None:
        """Store the result of this plan for statistics."""
        active, pays = self.worth.active, alone.nodes > 0
        if pick and (pick.rows or not pays):
            tokens = pick.tokens / batch.rows
            self.outlook = DraftDecision(
                bool(pick.rows) and active,
                pick.shape,
                tokens,
                pick.seconds / max(none_s, 1e-9),
                active,
                pays,
            )
        elif pays or not self.outlook or not self.outlook.shape:
            tokens = alone.rate * alone.seconds / batch.rows
            self.outlook = DraftDecision(
                pays and active, None, tokens, alone.seconds / max(none_s, 1e-9), active
            )

    def _best(
        self,
        batch: StepBatch,
        rows: Sequence[TrackRecord],
        room: Sequence[int],
        lookups: Sequence[Sequence[float]],
        alone: WidthCut,
    ) -> ShapePick:
        """Return the best shape and rows to draft, given the look-up results."""
        sure = [row[min(width, len(row) - 1)] for row, width in zip(lookups, alone.widths, strict=True)]
        tokens, worth = batch.tokens + alone.nodes, batch.rows + sum(sure)
        some_rows, all_rows = (self.steps.curve(batch.rows, alone.groups + more) for more in (1, 0))
        best, chosen, top = 0.0, 0, ShapePick(set(), self.shapes[0], 0.0, 0.0)
        for candidate in self.shapes:
            expected = list(accumulate(sorted(_gains(candidate, rows, room, lookups, sure), reverse=True)))
            for count in counts(len(expected)):
                width, gain = tokens + count * (candidate.num_draft_tokens - 1), expected[count - 1]
                verify = all_rows if count == len(expected) else some_rows
                seconds = verify(width) + self._drafting_s(candidate, count)
                if (pace := rate(worth + gain, seconds)) > best:
                    best, chosen = pace, count
                    top = ShapePick(set(), candidate, worth + gain, seconds)
        if best <= MARGIN * alone.rate:
            return top
        return replace(top, rows=highest(_gains(top.shape, rows, room, lookups, sure), chosen))

    def cut(self, batch: StepBatch, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Cut proposals to the nodes worth verifying: the best of each row, in few widths."""
        if not self.adaptive or not any(p.num_drafted for p in proposals):
            self._drafted = self._drafted if self._drafted >= REFRESH else 0
            return list(proposals)
        plan = self.current
        sums = [[0.0] if i == plan.probed_row else gains(p) for i, p in enumerate(proposals)]
        widths = self._best_cut(batch, sums).widths
        if not any(widths) and (plan.probe or self.probe_budget.is_open):
            width, plan.tries = min(max(p.num_drafted for p in proposals), 3), True
            (tried,) = highest([row[min(width, len(row) - 1)] for row in sums], 1)
            widths = tuple(width * (i == tried) for i in range(len(sums)))
        self._drafted = self._drafted + 1 if any(widths) else 0
        return [proposal.best(1 + width) for proposal, width in zip(proposals, widths, strict=True)]

    def _best_cut(self, batch: StepBatch, sums: Sequence[Sequence[float]]) -> WidthCut:
        """Return the cut that maximises tokens per second."""

        def curve(groups: int) -> Curve:
            predict = self.steps.curve(batch.rows, groups)
            return lambda nodes: predict(batch.tokens + nodes)

        return best_cut(sums, curve, mixed=self.mixed)

    def _drafting_s(self, shape: DraftShape, rows: int) -> float:
        return self.steps.pace * self.drafts[shape.topk].predict(rows, shape.num_steps)


def _within(shape: DraftShape, deep: int) -> DraftShape | None:
    """Limit a shape's depth to `deep`; None if that is 0."""
    if deep < 1:
        return None
    return shape if shape.num_steps <= deep else replace(shape, num_steps=deep)


def _gains(
    shape: DraftShape,
    rows: Sequence[TrackRecord],
    room: Sequence[int],
    lookups: Sequence[Sequence[float]],
    sure: Sequence[float],
) -> list[float]:
    """Return each row's expected gain of this shape over its look-up result."""
    return [
        max(row.expected(shape, min(shape.num_steps, deep)), lookup[-1]) - gain if deep > 0 else 0.0
        for row, deep, lookup, gain in zip(rows, room, lookups, sure, strict=True)
    ]
