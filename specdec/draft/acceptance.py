"""How deep drafts are accepted: one record for the engine, one for each request that starts from it."""

import operator
from itertools import accumulate

from specdec.draft.proposal import Shape

DEEPEST = 16
"""Depths beyond count as this one."""
MEMORY, ENGINE_MEMORY = 0.93, 0.998
"""What remains of a count after each further draft: a request's last 15 matter, the engine's last 500."""
RESTED = 0.98
"""What remains of a request's count after a step without a draft: meanwhile the text changes."""
PRIOR, ENGINE_PRIOR = 3.0, 4.0
"""Drafts that the engine's experience is worth to a request that has none, and hope to the engine."""
CHAIN_HOPE, TREE_HOPE = 0.8, 0.85
"""What is expected while nothing is known: more than most earn, so that drafts are tried, not thought bad."""
FADED = 8
"""Steps that are put together before a count fades: what is expected is reckoned anew after each."""
SURE = 0.98
"""No depth is expected to be accepted more often, whatever those above it are."""


class Acceptance:
    """Estimate, by depth, how often a draft is accepted there once the depth above it was."""

    def __init__(self, start: "Acceptance | float") -> None:
        self.start = start
        self.version = 0
        """Changes with every observation, here or where this one started from."""
        is_request = isinstance(start, Acceptance)
        self._memory, self._prior = (MEMORY, PRIOR) if is_request else (ENGINE_MEMORY, ENGINE_PRIOR)
        self._reached = [0.0] * DEEPEST
        self._accepted = [0.0] * DEEPEST
        self._rested = 0
        self._expected: list[float] = []
        self._expected_version = -1

    def observe(self, drafted_depth: int, accepted_depth: int) -> None:
        """Note one draft: how deep it went, and how deep the target followed. Depths count from 1.

        An attempt that found nothing to draft counts as one of depth 1 that was not followed.
        """
        self._fade(self._memory)
        for depth in range(min(max(drafted_depth, 1), accepted_depth + 1, DEEPEST)):
            self._reached[depth] += 1
            self._accepted[depth] += depth < accepted_depth
        if isinstance(self.start, Acceptance):
            self.start.observe(drafted_depth, accepted_depth)

    def decay(self, steps: int) -> None:
        """Fade the counts by steps without a draft."""
        self._rested += steps
        if self._rested >= FADED:
            self._fade(RESTED**self._rested)
            self._rested = 0

    def _fade(self, remains: float) -> None:
        for depth in range(DEEPEST):
            self._reached[depth] *= remains
            self._accepted[depth] *= remains
        self.version += 1

    @property
    def rates(self) -> list[float]:
        """Return the estimates for depths from 1 on.

        Until it was reached often enough, a depth is expected to be as much better or worse than elsewhere as
        the one above it is: else no draft would go deeper than what was tried.
        """
        start = self.start
        base = start.rates if isinstance(start, Acceptance) else [start] * DEEPEST
        rates, lift = [], 1.0
        for accepted, reached, elsewhere in zip(self._accepted, self._reached, base, strict=True):
            expected = min(elsewhere * lift, SURE)
            rates.append((accepted + self._prior * expected) / (reached + self._prior))
            lift = rates[-1] / elsewhere
        return rates

    def expected(self, depth: int) -> float:
        """Return how many tokens of a draft of `depth` steps will be accepted."""
        version = self.version + (self.start.version if isinstance(self.start, Acceptance) else 0)
        if version != self._expected_version:
            self._expected = list(accumulate(accumulate(self.rates, operator.mul), initial=0.0))
            self._expected_version = version
        return self._expected[min(depth, DEEPEST)]


class TrackRecord:
    """What drafts have earned: chains and trees apart, for at each depth a tree has more to offer."""

    def __init__(self, engine: "TrackRecord | None" = None) -> None:
        self.chain: Acceptance = Acceptance(engine.chain if engine else CHAIN_HOPE)
        self.tree: Acceptance = Acceptance(engine.tree if engine else TREE_HOPE)
        self.planned = 0
        """The policy's last plan in which this one was to draft: who rested longest is tried next."""

    def observe(self, shape: Shape, drafted_depth: int, accepted_depth: int) -> None:
        """Note one draft that was asked for in this shape."""
        self._of(shape).observe(drafted_depth, accepted_depth)

    def decay(self, steps: int) -> None:
        """Fade both by steps without a draft."""
        self.chain.decay(steps)
        self.tree.decay(steps)

    def expected(self, shape: Shape, depth: int) -> float:
        """Return how many tokens of such a draft, cut to `depth`, will be accepted."""
        return self._of(shape).expected(depth)

    def _of(self, shape: Shape) -> Acceptance:
        return self.tree if shape.topk > 1 else self.chain
