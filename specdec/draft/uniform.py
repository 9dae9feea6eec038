"""Choose one shape for a whole batch, from what whole steps took: for steps that are measured as one.

A captured step verifies and drafts in one go, so its cost is one number, and there are few shapes. Each is
tried a few times in a batch of about that size; then the best rate wins, and now and then another is tried.
"""

from collections.abc import Sequence

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import STALE, Samples, bucket
from specdec.draft.outlook import Outlook
from specdec.draft.proposal import Shape
from specdec.draft.widths import MARGIN

NEAR = 2
"""Buckets of rows that are near enough for one's costs to serve the other: a factor of 1.4."""

TRIES = 3
"""Steps in a row that tell what a shape costs; the first of a shape verifies what another one drafted."""


class UniformPolicy:
    """Choose among no draft, chains, and the bounds; where it is not adaptive, always the bounds."""

    def __init__(self, bounds: Shape | None, *, adaptive: bool) -> None:
        """Without bounds there are no drafts."""
        self.bounds, self.adaptive = bounds, adaptive
        self.outlook = Outlook(True, bounds) if bounds and not adaptive else None
        """What the last choice came to; a trial is none."""
        self.costs = Samples()
        self._measured: dict[Shape | None, set[int]] = {}
        """In which buckets of rows each shape's cost is known."""
        self._trying: Shape | None = None
        self._left = 0
        """Steps that the trial has yet to run."""
        self._since = 0
        """Steps since the last trial."""
        self._tried: dict[tuple[Shape | None, int], int] = {}
        """When each shape was last tried."""
        self._steps = 0
        shapes: list[Shape | None] = [None] if adaptive or bounds is None else [bounds]
        if adaptive and bounds is not None:
            deepest = min(bounds.num_steps, bounds.num_draft_tokens - 1)
            shapes += [Shape(depth, 1, depth + 1) for depth in range(1, deepest + 1)]
            shapes += [bounds] if bounds.topk > 1 else []
        self.shapes = tuple(shapes)

    def observe(self, shape: Shape | None, rows: int, seconds: float) -> None:
        """Note what a step took whose windows had this shape, and which drafted the same anew."""
        self.costs.add((shape, bucket(rows)), seconds)
        self._measured.setdefault(shape, set()).add(bucket(rows))

    def choose(self, rows: Sequence[TrackRecord]) -> Shape | None:
        """Return the shape that gives most tokens a second."""
        self._steps += 1
        if not self.adaptive or self.bounds is None:
            return self.bounds
        key = bucket(len(rows))
        if not self._left:
            self._since += 1
            unknown = [shape for shape in self.shapes if self._cost(shape, key) is None]
            rested = min(unknown or self.shapes, key=lambda shape: self._tried.get((shape, key), 0))
            if unknown or self._since > STALE * self._dearness(rested, key):
                self._trying, self._left, self._since = rested, 1 + TRIES, 0
        if self._left:
            self._left -= 1
            self._tried[self._trying, key] = self._steps
            return self._trying
        none_s = self._cost(None, key) or 0.0
        best, rate = None, 0.0
        for shape in self.shapes[1:]:
            gain = sum(row.expected(shape, shape.num_steps) for row in rows if shape)
            seconds = max(self._cost(shape, key) or 0.0, 1e-9)
            if (own := (len(rows) + gain) / seconds) > rate:
                best, rate = shape, own
                tokens, cost = 1 + gain / len(rows), seconds / max(none_s, 1e-9)
        if best is None:
            return None
        pays = rate > MARGIN * len(rows) / max(none_s, 1e-9)
        self.outlook = Outlook(pays, best, tokens, cost)
        return best if pays else None

    def _dearness(self, shape: Shape | None, key: int) -> float:
        """Say how many of the cheapest steps one of this shape takes: what is dear is tried less often."""
        known = [self._cost(own, key) or 0.0 for own in self.shapes]
        return (self._cost(shape, key) or 0.0) / max(min(known), 1e-9)

    def _cost(self, shape: Shape | None, key: int) -> float | None:
        """Return what a shape takes in a batch of about this size; None: that was never seen."""
        near = min(self._measured.get(shape, ()), key=lambda own: abs(own - key), default=None)
        return None if near is None or abs(near - key) > NEAR else self.costs.get((shape, near))
