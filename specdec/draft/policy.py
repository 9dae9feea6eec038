"""Which shape of draft pays: decided anew each step from what steps cost and what drafts have earned.

Twice a step. Before drafting, by what each request has accepted so far: is a draft worth its own cost, how
deep, and for whom. After it, when every node has a score: how many nodes are worth verifying, and for whom.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import STALE, Costs
from specdec.draft.proposal import Proposal, Shape

PROBE_SHARE = 0.008
"""Part of the time that may go into drafts that are not expected to pay, to learn whether they would."""
MARGIN = 1.02
"""How much better than none a draft must look: an estimate that is off by less must not cost anything."""
WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Numbers of nodes that are tried: few, so that the cost of each is known soon."""

REFRESH, TIMES = STALE + 50, 3
"""After so many steps with drafts, some without: what these cost must be known as it is now."""
LONGEST_SLEEP = 16
"""While nothing pays, plans are made this seldom: not drafting is to cost nothing."""
JUDGED = 32
"""Plans over which it is judged whether they pay."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step does whatever is drafted."""

    rows: int
    """Rows that decode."""
    tokens: int
    """One for each of them, and those of the rows that read a prompt."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How many rows verify, how many nodes each, and the tokens a second that this gives."""

    rows: int
    width: int
    rate: float


@dataclass(slots=True)
class Worth:
    """Whether plans make up for the time they take themselves; where they do not, they are made seldom."""

    saves_s: float = 0.0
    """Of late, by a plan's own estimate."""
    takes_s: float = 0.0
    nap: int = 0
    """How many are left out."""

    def note(self, saved_s: float, took_s: float, *, drafts: bool) -> None:
        """Hear what came of a plan."""
        self.saves_s += (saved_s - self.saves_s) / JUDGED
        self.takes_s += (took_s - self.takes_s) / JUDGED
        self.nap = 0 if drafts or self.saves_s > self.takes_s else min(2 * self.nap + 1, LONGEST_SLEEP)


class Policy:
    """Choose shapes within `bounds`; where it is not adaptive, always the bounds."""

    def __init__(self, bounds: Shape, *, adaptive: bool) -> None:
        self.bounds, self.adaptive = bounds, adaptive
        self.steps = Costs()
        """Verify steps, by tokens."""
        self.drafts = {topk: Costs() for topk in {1, bounds.topk}}
        """Drafts, by levels: chains, and trees that are as wide as the bounds."""
        self._owed_s = 0.0
        """Time that probes have cost and the steps since have not made up for; below 0 one may be made."""
        self._probe = 0.0
        """Part of this step's drafting that is a probe."""
        self._aside: int | None = None
        """The row that is probed beside others that draft: its first guess is judged, not verified."""
        self._tried_s: float | None = None
        """What this step would have taken without the nodes that are verified as a probe."""
        self._plans = 0
        self._drafted = 0
        """Steps since the last without a draft."""
        self.worth = Worth()
        self._slept = 0
        """How many plans were left out."""
        self._rows: Sequence[TrackRecord] = ()
        deepest = min(bounds.num_steps, bounds.num_draft_tokens - 1)
        chains = tuple(Shape(depth, 1, depth + 1) for depth in range(1, deepest + 1))
        self.shapes = chains if bounds.topk == 1 else (*chains, bounds)

    def observe_draft(self, shape: Shape | None, rows: int, seconds: float) -> None:
        """Note what drafting a shape for so many rows took; None: several, or some of it was catching up."""
        self._owed_s += self._probe * seconds
        if shape:
            self.drafts[shape.topk].observe(rows, shape.num_steps, seconds)

    def observe_step(self, rows: int, tokens: int, seconds: float) -> None:
        """Note what a step took beside its drafting."""
        if self._tried_s is not None:
            self._owed_s += max(seconds - self._tried_s, 0.0)
        self.steps.observe(rows, tokens, seconds)

    def plan(
        self,
        batch: Batch,
        rows: Sequence[TrackRecord],
        room: Sequence[int],
        look_up: Callable[[], Sequence[Proposal]] | None = None,
        *,
        grows: bool = True,
    ) -> list[Shape | None]:
        """Say which rows should draft, and in what shape; `room` is how deep a row's output can still go.

        What `look_up` finds is there for nothing: drafting must earn more than that would alone. It is not
        asked in steps that are to be without any draft. Unless drafts can be grown, there is only that. Where
        nobody has room, nothing is weighed.
        """
        self._probe, self._aside, self._tried_s = 0.0, None, None
        self._plans += 1
        if not any(deep > 0 for deep in room):
            return [None] * len(room)
        if not self.adaptive:
            return [_within(self.bounds, deep) for deep in room]
        if self._drafted >= REFRESH:
            self._drafted = self._drafted + 1 if self._drafted < REFRESH + TIMES - 1 else 0
            return [None] * len(room)
        if rows != self._rows:
            self.worth.nap = 0
        if self._slept < self.worth.nap:
            self._slept += 1
            return [None] * len(room)
        start_s, none_s = time.perf_counter(), self.steps.predict(batch.rows, batch.tokens)
        self._owed_s = max(self._owed_s - PROBE_SHARE * none_s * (1 + self._slept), -none_s)
        passed, self._slept, self._rows = 1 + self._slept, 0, rows
        found = [_sums(proposal) for proposal in look_up()] if look_up else [[0.0]] * len(room)
        alone = self._widest(batch, found)
        kept = [_gain(own, alone.width) for own in found]
        given = _highest(kept, alone.rows)
        rate, drafting, shape = alone.rate, set[int](), self.shapes[0]
        if grows:
            sure = [gain if i in given else 0.0 for i, gain in enumerate(kept)]
            rate, drafting, shape = self._best(batch, rows, room, found, sure, alone)
            resting = [i for i, deep in enumerate(room) if deep > 0 and i not in drafting | given]
            if resting and self._owed_s < 0:
                probed = min(resting, key=lambda i: rows[i].planned)
                self._probe, self._aside = 1 / (1 + len(drafting)), probed if drafting else None
                drafting.add(probed)
        for i, row in enumerate(rows):
            if i in drafting:
                row.planned = self._plans
            else:
                row.rest(passed)
        # At least: a step that drafts takes longer than one without.
        saved_s = none_s * (rate * none_s / batch.rows - 1) if drafting or given else 0.0
        self.worth.note(saved_s, time.perf_counter() - start_s, drafts=bool(drafting or given))
        return [_within(shape, deep) if i in drafting else None for i, deep in enumerate(room)]

    def _best(
        self,
        batch: Batch,
        rows: Sequence[TrackRecord],
        room: Sequence[int],
        found: Sequence[Sequence[float]],
        sure: Sequence[float],
        alone: "Cut",
    ) -> tuple[float, set[int], Shape]:
        """Say what the best drafts beside what was found give, for which rows and in what shape."""
        tokens, worth = batch.tokens + alone.rows * alone.width, batch.rows + sum(sure)
        best, chosen, shape = MARGIN * alone.rate, 0, self.shapes[0]
        for candidate in self.shapes:
            gains = sorted(_gains(candidate, rows, room, found, sure), reverse=True)
            for count, gain in _prefixes(gains):
                width = tokens + count * (candidate.num_draft_tokens - 1)
                seconds = self.steps.predict(batch.rows, width) + self._draft_s(candidate, count)
                if (rate := _rate(worth + gain, seconds)) > best:
                    best, chosen, shape = rate, count, candidate
        drafting = _highest(_gains(shape, rows, room, found, sure), chosen)
        return best if drafting else alone.rate, drafting, shape

    def cut(self, batch: Batch, proposals: Sequence[Proposal]) -> list[Proposal]:
        """Keep what is worth verifying: the same number of nodes for every row that keeps any."""
        if not self.adaptive or not any(map(len, proposals)):
            self._drafted = self._drafted if self._drafted >= REFRESH else 0
            return list(proposals)
        sums = [[0.0] if i == self._aside else _sums(p) for i, p in enumerate(proposals)]
        best = self._widest(batch, sums)
        chosen, width = best.rows, best.width
        if not chosen and (self._probe or self._owed_s < 0):
            chosen, width = 1, min(max(map(len, proposals)), 3)
            self._tried_s = self.steps.predict(batch.rows, batch.tokens)
        self._drafted = self._drafted + 1 if chosen else 0
        kept = _highest([_gain(own, width) for own in sums], chosen)
        return [p.best(width) if i in kept else Proposal.EMPTY for i, p in enumerate(proposals)]

    def _widest(self, batch: Batch, sums: Sequence[Sequence[float]]) -> "Cut":
        """Say how many rows should verify how many of their best nodes; `sums` by row, from 0 nodes on."""
        none_s = self.steps.predict(batch.rows, batch.tokens)
        best, widest = Cut(0, 0, MARGIN * _rate(batch.rows, none_s)), max(map(len, sums)) - 1
        for nodes in sorted({widest, *(n for n in WIDTHS if n < widest)} - {0}):
            gains = sorted((_gain(own, nodes) for own in sums), reverse=True)
            for count, gain in _prefixes(gains):
                seconds = self.steps.predict(batch.rows, batch.tokens + count * nodes)
                if (rate := _rate(batch.rows + gain, seconds)) > best.rate:
                    best = Cut(count, nodes, rate)
        return best if best.rows else replace(best, rate=best.rate / MARGIN)

    def _draft_s(self, shape: Shape, rows: int) -> float:
        """Predict what drafting takes."""
        return self.drafts[shape.topk].predict(rows, shape.num_steps)


def _within(shape: Shape, deep: int) -> Shape | None:
    """Shorten a shape to the depth that the output has room for."""
    if deep < 1:
        return None
    return shape if shape.num_steps <= deep else replace(shape, num_steps=deep)


def _sums(proposal: Proposal) -> list[float]:
    """Say how many tokens the best 0, 1, 2 … nodes are expected to bring."""
    return list(accumulate(sorted(proposal.scores, reverse=True), initial=0.0))


def _gain(sums: Sequence[float], nodes: int) -> float:
    return sums[min(nodes, len(sums) - 1)]


def _gains(
    shape: Shape,
    rows: Sequence[TrackRecord],
    room: Sequence[int],
    found: Sequence[Sequence[float]],
    sure: Sequence[float],
) -> list[float]:
    """Say how many more tokens than are sure without it each row is expected to accept in this shape."""
    return [
        max(row.expected(shape, min(shape.num_steps, deep)), own[-1]) - known if deep > 0 else 0.0
        for row, deep, own, known in zip(rows, room, found, sure, strict=True)
    ]


def _prefixes(gains: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the sums of the first 1, 2, 4 … gains, and of all."""
    sums = list(accumulate(gains))
    count = 1
    while count < len(sums):
        yield count, sums[count - 1]
        count *= 2
    yield len(sums), sums[-1]


def _highest(gains: Sequence[float], count: int) -> set[int]:
    return set(sorted(range(len(gains)), key=lambda i: -gains[i])[:count])


def _rate(tokens: float, seconds: float) -> float:
    return tokens / max(seconds, 1e-9)
