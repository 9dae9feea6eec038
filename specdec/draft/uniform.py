"""Choose one shape for a whole batch, from what whole steps took: for steps that are measured as one.

A captured step verifies and drafts in one go, so its cost is one number, and there are few shapes. Each is
tried a few times in a batch of about that size; then the best rate wins, and now and then another is tried.
"""

from collections.abc import Sequence

from specdec.draft.acceptance import TrackRecord
from specdec.draft.costs import Samples, bucket
from specdec.draft.outlook import Outlook
from specdec.draft.proposal import Shape
from specdec.draft.widths import MARGIN

NEAR = 2
"""Buckets of rows that are near enough for one's costs to serve the other: a factor of 1.4."""

LEAST_S = 1e-9
"""What counts as no time."""
FOUND = "found"

HELD, TURNED = 16, 32
"""Steps for which a choice holds: to make one takes a part of a small model's step, and to begin or end
drafting takes several, since a head must catch up, and a batch is loaded anew. With 4 instead of 16 `tiny`
took 6 % longer greedily and 4 % at temperature 1."""
BEGIN = 1.1
"""How much better than none a draft must look to begin with; to go on, less will do."""
TRIES = 3
"""Steps in a row that tell what a shape costs; the first of a shape verifies what another one drafted."""
TRIED, TURN = 0.01, 5
"""Part of the time that trials may take; and what it takes to begin and end one, in the cheapest steps."""
WARM = 12
"""The cheapest steps that a trial lasts at least: until then caches hold what other steps have read."""


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
        self._since = 0.0
        """Time since the last trial, in the cheapest steps."""
        self._tried: dict[tuple[Shape | None, int], int] = {}
        """When each shape was last tried."""
        self._steps = self._trials = 0
        self._held = 0
        """Steps for which the last choice holds."""
        self._key = 0
        """The batch's size, by bucket, for which it was made."""
        self._chosen: Shape | None = None
        self._weight = 1.0
        """What a step of it takes, in the cheapest steps."""
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

    def observe_found(self, shape: Shape | None, rows: int, seconds: float) -> None:
        """Note what a step took that verified what was looked up, and drafted in this shape."""
        self.costs.add((FOUND, shape, bucket(rows)), seconds)

    def begin_trial(self, shape: Shape | None, rows: int) -> int:
        """Choose this shape for the next steps, which tell what it costs; return how many these are."""
        self._trying, self._left, self._since = shape, self._lasts(shape, bucket(rows)), 0.0
        return self._left

    def _lasts(self, shape: Shape | None, key: int) -> int:
        """Return how many steps a trial takes."""
        # What all shapes are compared with must not be measured cold.
        dearness = self._dearness(shape, key) or float(shape is None)
        return 1 + max(TRIES, round(WARM / dearness) if dearness else 0)

    def cost(self, shape: Shape | None, rows: int) -> float:
        """Return what a step of this shape takes, as far as that is known."""
        return self._cost(shape, bucket(rows)) or LEAST_S

    def cost_of_found(self, shape: Shape | None, rows: int) -> float:
        """Return the cost of verifying windows as wide as the bounds: at most that of drafting them too."""
        known = self.costs.get((FOUND, shape, bucket(rows)))
        return known or max(self.cost(shape, rows), self.cost(self.shapes[-1], rows))

    def choose(self, rows: Sequence[TrackRecord]) -> Shape | None:
        """Return the shape that gives most tokens a second; what was found out holds for some steps."""
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
        """Choose anew for the next step: it has other requests."""
        self._held = 0

    def _try(self, key: int) -> Shape | None:
        self._left, self._held = self._left - 1, 0
        self._tried[self._trying, key] = self._steps
        return self._trying

    def _to_try(self, unknown: Sequence[Shape | None], rows: Sequence[TrackRecord], key: int) -> Shape | None:
        """Return the shape that was tried longest ago, or in turn with it the one thought next best."""
        if not unknown and self._trials % 2:
            rates = {shape: self._rate(shape, rows, key) for shape in self.shapes if shape != self._chosen}
            return max(rates, key=rates.__getitem__, default=None)
        return min(unknown or self.shapes, key=lambda shape: self._tried.get((shape, key), 0))

    def _rate(self, shape: Shape | None, rows: Sequence[TrackRecord], key: int) -> float:
        """Return the tokens a second that a shape is expected to give."""
        gain = sum(row.expected(shape, shape.num_steps) for row in rows if shape)
        return (len(rows) + gain) / (self._cost(shape, key) or LEAST_S)

    def _best(self, rows: Sequence[TrackRecord], key: int) -> Shape | None:
        plain = self._rate(None, rows, key)
        rates = {shape: self._rate(shape, rows, key) for shape in self.shapes if shape}
        if not rates:
            return None
        best = max(rates, key=rates.__getitem__)
        pays = rates[best] > (BEGIN if self._chosen is None else MARGIN) * plain
        dearness = (self._cost(best, key) or LEAST_S) / (self._cost(None, key) or LEAST_S)
        self.outlook = Outlook(pays, best, rates[best] / plain * dearness, dearness)
        return best if pays else None

    def _dearness(self, shape: Shape | None, key: int) -> float:
        """Return how many of the cheapest steps one of this shape costs: expensive ones are tried less."""
        known = [self._cost(own, key) or 0.0 for own in self.shapes]
        return (self._cost(shape, key) or 0.0) / max(min(known), 1e-9)

    def _cost(self, shape: Shape | None, key: int) -> float | None:
        """Return what a shape takes in a batch of about this size; None: that was never seen."""
        near = min(self._measured.get(shape, ()), key=lambda own: abs(own - key), default=None)
        return None if near is None or abs(near - key) > NEAR else self.costs.get((shape, near))
