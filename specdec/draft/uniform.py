"""Choose one shape per batch from whole step times, for steps that can only be timed as a whole.

A captured step verifies and drafts in one graph, so its cost is one number, and there are few shapes. Each
shape is tried a few times per batch size; then the best rate wins, and another shape is tried occasionally.
"""

from collections.abc import Sequence

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import CostSamples, bucket
from specdec.draft.decision import DraftDecision
from specdec.draft.proposal import DraftShape
from specdec.draft.widths import MARGIN

NEAR = 2
"""Distance in buckets within which row counts share costs: a factor of 1.4."""

LEAST_S = 1e-9
"""Substitute for zero or unknown times."""
FOUND = "found"

HELD, TURNED = 16, 32
"""Steps for which a choice holds: choosing costs part of a small model's step, and turning drafts on or off
costs several, since a head must catch up and a batch is loaded again. With 4 instead of 16 `tiny` took 6 %
longer greedily and 4 % at temperature 1."""
BEGIN = 1.1
"""Minimum gain over no draft to start drafting; `MARGIN` suffices to continue."""
TRIES = 3
"""Consecutive steps that measure a shape; the first verifies drafts of the previous shape."""
TRIED, TURN = 0.01, 5
"""Fraction of the time for trials, and the cost to start and end one, in cheapest steps."""
WARM = 12
"""Minimum length of a trial, in cheapest steps: until then caches hold data of other steps."""


class UniformPolicy:
    """Choose among no draft, chains, and the bounds; if not adaptive, always the bounds."""

    def __init__(self, bounds: DraftShape | None, *, adaptive: bool) -> None:
        """Without bounds there are no drafts."""
        self.bounds, self.adaptive = bounds, adaptive
        self.outlook = DraftDecision(True, bounds) if bounds and not adaptive else None
        """Result of the last choice; trials do not change it."""
        self.costs = CostSamples()
        self._measured: dict[DraftShape | None, set[int]] = {}
        """Row buckets in which each shape's cost is known."""
        self._trying: DraftShape | None = None
        self._left = 0
        """Remaining steps of the trial."""
        self._since = 0.0
        """Time since the last trial, in cheapest steps."""
        self._tried: dict[tuple[DraftShape | None, int], int] = {}
        """Step of each shape's last trial."""
        self._steps = self._trials = 0
        self._held = 0
        """Remaining steps of the last choice."""
        self._key = 0
        """Row bucket of the last choice."""
        self._chosen: DraftShape | None = None
        self._weight = 1.0
        """Cost of a step of the chosen shape, in cheapest steps."""
        shapes: list[DraftShape | None] = [None] if adaptive or bounds is None else [bounds]
        if adaptive and bounds is not None:
            deepest = min(bounds.num_steps, bounds.num_draft_tokens - 1)
            shapes += [DraftShape(depth, 1, depth + 1) for depth in range(1, deepest + 1)]
            shapes += [bounds] if bounds.topk > 1 else []
        self.shapes = tuple(shapes)

    def observe(self, shape: DraftShape | None, rows: int, seconds: float) -> None:
        """Record the time of a step that verified and drafted this shape."""
        self.costs.add((shape, bucket(rows)), seconds)
        self._measured.setdefault(shape, set()).add(bucket(rows))

    def observe_found(self, shape: DraftShape | None, rows: int, seconds: float) -> None:
        """Record the time of a step that verified look-up results and drafted this shape."""
        self.costs.add((FOUND, shape, bucket(rows)), seconds)

    def begin_trial(self, shape: DraftShape | None, rows: int) -> int:
        """Run this shape for the next steps to measure it; return their number."""
        self._trying, self._left, self._since = shape, self._lasts(shape, bucket(rows)), 0.0
        return self._left

    def _lasts(self, shape: DraftShape | None, key: int) -> int:
        """Return the number of steps of a trial."""
        # The baseline must not be measured with cold caches.
        dearness = self._dearness(shape, key) or float(shape is None)
        return 1 + max(TRIES, round(WARM / dearness) if dearness else 0)

    def cost(self, shape: DraftShape | None, rows: int) -> float:
        """Return the known seconds of a step of this shape, or `LEAST_S`."""
        return self._cost(shape, bucket(rows)) or LEAST_S

    def cost_of_found(self, shape: DraftShape | None, rows: int) -> float:
        """Return the cost of verifying look-up windows as wide as the bounds.

        Until measured, the cost of also drafting them is an upper bound.
        """
        cost = self.costs.get((FOUND, shape, bucket(rows)))
        return cost or max(self.cost(shape, rows), self.cost(self.shapes[-1], rows))

    def choose(self, rows: Sequence[TrackRecord]) -> DraftShape | None:
        """Return the shape with the most expected tokens per second; a choice holds for several steps."""
        self._steps += 1
        if not self.adaptive or self.bounds is None:
            return self.bounds
        key = bucket(len(rows))
        if self._left:
            return self._try(key)
        self._since += self._weight
        if self._held and key == self._key:
            self._held -= 1
            return self._chosen
        unknown = [shape for shape in self.shapes if self._cost(shape, key) is None]
        if unknown or self._since * TRIED > TRIES:
            shape = self._to_try(unknown, rows, key)
            takes = self._lasts(shape, key) * self._dearness(shape, key) + TURN
            if unknown or self._since * TRIED > takes:
                self._trials += 1
                self.begin_trial(shape, len(rows))
                return self._try(key)
        best = self._best(rows, key)
        turns = (best is None) != (self._chosen is None)
        self._held, self._key, self._chosen = (TURNED if turns else HELD) - 1, key, best
        self._weight = self._dearness(best, key)
        return best

    def reconsider(self) -> None:
        """Choose again in the next step, whose batch has changed."""
        self._held = 0

    def _try(self, key: int) -> DraftShape | None:
        self._left, self._held = self._left - 1, 0
        self._tried[self._trying, key] = self._steps
        return self._trying

    def _to_try(
        self, unknown: Sequence[DraftShape | None], rows: Sequence[TrackRecord], key: int
    ) -> DraftShape | None:
        """Return the shape whose trial is oldest, alternating with the second-best one."""
        if not unknown and self._trials % 2:
            rates = {shape: self._rate(shape, rows, key) for shape in self.shapes if shape != self._chosen}
            return max(rates, key=rates.__getitem__, default=None)
        return min(unknown or self.shapes, key=lambda shape: self._tried.get((shape, key), 0))

    def _rate(self, shape: DraftShape | None, rows: Sequence[TrackRecord], key: int) -> float:
        gain = sum(row.expected(shape, shape.num_steps) for row in rows if shape)
        return (len(rows) + gain) / (self._cost(shape, key) or LEAST_S)

    def _best(self, rows: Sequence[TrackRecord], key: int) -> DraftShape | None:
        plain = self._rate(None, rows, key)
        rates = {shape: self._rate(shape, rows, key) for shape in self.shapes if shape}
        if not rates:
            return None
        best = max(rates, key=rates.__getitem__)
        pays = rates[best] > (BEGIN if self._chosen is None else MARGIN) * plain
        dearness = (self._cost(best, key) or LEAST_S) / (self._cost(None, key) or LEAST_S)
        self.outlook = DraftDecision(pays, best, rates[best] / plain * dearness, dearness)
        return best if pays else None

    def _dearness(self, shape: DraftShape | None, key: int) -> float:
        """Return a shape's cost in cheapest steps; expensive shapes are tried less often."""
        costs = [self._cost(other, key) or 0.0 for other in self.shapes]
        return (self._cost(shape, key) or 0.0) / max(min(costs), 1e-9)

    def _cost(self, shape: DraftShape | None, key: int) -> float | None:
        """Return a shape's seconds at about this batch size, or None if unknown."""
        near = min(self._measured.get(shape, ()), key=lambda other: abs(other - key), default=None)
        return None if near is None or abs(near - key) > NEAR else self.costs.get((shape, near))
