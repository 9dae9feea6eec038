"""Choose one shape per batch from whole step times, for steps that can only be timed as a whole.

A captured step verifies and drafts in one graph, so its cost is one number, and there are few shapes. Each
shape is tried a few times per batch size; then the best rate wins, and another shape is tried occasionally.
"""

from collections.abc import Sequence

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import Costs, bucket
from specdec.draft.policy import MARGIN, DraftOption, DraftPolicy
from specdec.draft.proposal import DraftShape

HELD, TURNED = 16, 32
"""Steps for which a choice holds: choosing costs part of a small model's step, and turning drafts on or off
costs several, since a head must catch up and a batch is loaded again. With 4 instead of 16 `tiny` took 6 %
longer greedily and 4 % at temperature 1."""
BEGIN = 1.1
"""Minimum gain over no draft to start drafting; `MARGIN` suffices to continue."""
TRIES = 3
"""Consecutive steps that measure a shape; the first verifies drafts of the previous shape."""
TURN = 5
"""Cost to start and end a trial, in plain steps."""
WARM = 12
"""Minimum length of a trial, in plain steps: until then caches hold data of other steps."""


class ShapeChooser:
    """Chooses the shape of device steps by a policy; without one there are no drafts."""

    def __init__(self, policy: DraftPolicy | None) -> None:
        self.policy = policy
        self.bounds = policy.bounds if policy else None
        self.shapes: tuple[DraftShape | None, ...] = (None,)
        """No draft, and the policy's shapes; if it is not adaptive, its bounds only."""
        if policy:
            self.shapes = (None, *policy.shapes) if policy.adaptive else (policy.bounds,)
        widths = {1, *(shape.topk for shape in self.shapes if shape)}  # requests may ask for no drafts
        self._costs = {(found, topk): Costs(paced=False) for found in (False, True) for topk in widths}
        """Whole step times by the levels of a shape; if `found`, of steps that verify look-up results."""
        self._trying: DraftShape | None = None
        self._left = 0
        """Remaining steps of the trial."""
        self._tried: dict[tuple[DraftShape | None, int], int] = {}
        """Step of each shape's last trial."""
        self._steps = self._trials = 0
        self._held = 0
        """Remaining steps of the last choice."""
        self._key = 0
        """Row bucket of the last choice."""
        self._chosen: DraftShape | None = None
        self._weight = 1.0
        """Cost of a step of the chosen shape, in plain steps."""

    def observe(self, shape: DraftShape | None, rows: int, seconds: float, *, found: bool = False) -> None:
        """Record the time of a step that drafted this shape, and verified it or what look-ups `found`."""
        self._of(shape, found=found).observe(rows, _levels(shape), seconds)

    def _of(self, shape: DraftShape | None, *, found: bool = False) -> Costs:
        return self._costs[found, shape.topk if shape else 1]

    def trial(self, shape: DraftShape | None, rows: int) -> tuple[int, float]:
        """Return the number of steps in which a shape is measured, and their cost in plain steps.

        The plain step must not be measured with cold caches.
        """
        dearness = self._dearness(shape, rows)
        steps = 1 + max(TRIES, round(WARM / dearness) if dearness else 0)
        return steps, steps * dearness + TURN

    def cost(self, shape: DraftShape | None, rows: int, *, found: bool = False) -> float:
        """Return the seconds of a step of this shape; 0 if not measured at about this size."""
        return self._of(shape, found=found).measured(rows, _levels(shape))

    def cost_of_found(self, shape: DraftShape | None, rows: int) -> float:
        """Return the cost of verifying look-up windows as wide as the bounds.

        Until measured, the cost of also drafting them is an upper bound.
        """
        bound = max(self.cost(shape, rows), self.cost(self.shapes[-1], rows))
        return self.cost(shape, rows, found=True) or bound

    def choose(self, rows: Sequence[TrackRecord]) -> DraftShape | None:
        """Return the shape with the most expected tokens per second; a choice holds for several steps."""
        self._steps += 1
        if self.policy is None or not self.policy.adaptive:
            return self.bounds
        count, key, trials = len(rows), bucket(len(rows)), self.policy.budget.trials
        if self._left:
            return self._try(key)
        trials.earn(self._weight)
        if self._held and key == self._key:
            self._held -= 1
            return self._chosen
        unknown = [shape for shape in self.shapes if not self.cost(shape, count)]
        shape = self._to_try(unknown, rows, key)
        steps, cost = self.trial(shape, count)
        if unknown or trials.debt < -cost:
            self._trying, self._left, trials.debt = shape, steps, 0.0
            self._trials += 1
            return self._try(key)
        best = self._best(self.policy, rows)
        turns = (best is None) != (self._chosen is None)
        self._held, self._key, self._chosen = (TURNED if turns else HELD) - 1, key, best
        self._weight = self._dearness(best, count)
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
        if self.policy and not unknown and self._trials % 2:
            others = [shape for shape in self.shapes if shape != self._chosen]
            return self.policy.best(self._option(shape, rows) for shape in others).shape
        return min(unknown or self.shapes, key=lambda shape: self._tried.get((shape, key), 0))

    def _option(self, shape: DraftShape | None, rows: Sequence[TrackRecord]) -> DraftOption:
        gain = sum(row.expected(shape, shape.num_steps) for row in rows if shape)
        return DraftOption.of(shape, len(rows), len(rows) + gain, self.cost(shape, len(rows)))

    def _best(self, policy: DraftPolicy, rows: Sequence[TrackRecord]) -> DraftShape | None:
        plain, *options = [self._option(shape, rows) for shape in self.shapes]
        best = policy.best(options)
        pays = best.rate > (BEGIN if self._chosen is None else MARGIN) * plain.rate
        policy.note(best, len(rows), plain.seconds, pays=pays)
        return best.shape if pays else None

    def _dearness(self, shape: DraftShape | None, rows: int) -> float:
        """Return a shape's cost in plain steps, 0 if unknown; expensive shapes are tried less often."""
        if shape is None:
            return 1.0
        cost = self.cost(shape, rows)
        return cost / (self.cost(None, rows) or cost or 1.0)


def _levels(shape: DraftShape | None) -> int:
    return shape.num_steps if shape else 0
