"""Draft acceptance rates by depth: one estimate per request, each starting from the engine-wide one."""

import operator
from itertools import accumulate

from specdec.draft.proposal import DraftShape

DEEPEST = 16
"""Deeper depths share the entry of this one."""
MEMORY, ENGINE_MEMORY = 0.93, 0.998
"""Decay of a count per draft: about the last 15 drafts count for a request, the last 500 for the engine."""
RESTED = 0.98
"""Decay of a request's counts per step without a draft, during which the text changes."""
PRIOR, ENGINE_PRIOR = 3.0, 4.0
"""Prior weights, in drafts: the engine's rates for a new request, the initial rates for the engine."""
CHAIN_HOPE, TREE_HOPE = 0.8, 0.85
"""Initial acceptance rates, higher than most drafts reach, so that drafts are tried first."""
FADED = 8
"""Steps batched before a count decays; the expected values are recomputed after each decay."""
SURE = 0.98
"""Upper bound of the expected acceptance rate at any depth."""


class Acceptance:
    """Acceptance rate per depth, conditional on the parent depth being accepted."""

    def __init__(self, start: "Acceptance | float") -> None:
        self.start = start
        self.version = 0
        """Incremented by every observation, here or in `start`."""
        is_request = isinstance(start, Acceptance)
        self._memory, self._prior = (MEMORY, PRIOR) if is_request else (ENGINE_MEMORY, ENGINE_PRIOR)
        self._reached = [0.0] * DEEPEST
        self._accepted = [0.0] * DEEPEST
        self._rested = 0
        self._expected: list[float] = []
        self._expected_version = -1

    def observe(self, drafted_depth: int, accepted_depth: int) -> None:
        """Record one draft: its depth and the accepted depth, both counted from 1.

        A draft attempt that found nothing counts as a rejected draft of depth 1.
        """
        self._fade(self._memory)
        for depth in range(min(max(drafted_depth, 1), accepted_depth + 1, DEEPEST)):
            self._reached[depth] += 1
            self._accepted[depth] += depth < accepted_depth
        if isinstance(self.start, Acceptance):
            self.start.observe(drafted_depth, accepted_depth)

    def decay(self, steps: int) -> None:
        """Decay the counts for steps without a draft."""
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
        """Return the estimated rates for depths from 1 on.

        While a depth has few samples, its ratio to the prior rate is taken from the depth above. Otherwise no
        draft would go deeper than the depths already tried.
        """
        start = self.start
        base = start.rates if isinstance(start, Acceptance) else [start] * DEEPEST
        rates, lift = [], 1.0
        for accepted, reached, prior in zip(self._accepted, self._reached, base, strict=True):
            expected = min(prior * lift, SURE)
            rates.append((accepted + self._prior * expected) / (reached + self._prior))
            lift = rates[-1] / prior
        return rates

    def expected(self, depth: int) -> float:
        """Return the expected number of accepted tokens of a draft of `depth` steps."""
        version = self.version + (self.start.version if isinstance(self.start, Acceptance) else 0)
        if version != self._expected_version:
            self._expected = list(accumulate(accumulate(self.rates, operator.mul), initial=0.0))
            self._expected_version = version
        return self._expected[min(depth, DEEPEST)]


class TrackRecord:
    """Acceptance of chains and trees, separately: at each depth a tree has more candidates."""

    def __init__(self, engine: "TrackRecord | None" = None) -> None:
        self.chain: Acceptance = Acceptance(engine.chain if engine else CHAIN_HOPE)
        self.tree: Acceptance = Acceptance(engine.tree if engine else TREE_HOPE)
        self.planned = 0
        """Number of the policy's last plan in which this request was to draft; the lowest is probed next."""

    def observe(self, shape: DraftShape, drafted_depth: int, accepted_depth: int) -> None:
        """Record one draft of this shape."""
        self._of(shape).observe(drafted_depth, accepted_depth)

    def decay(self, steps: int) -> None:
        """Decay both for steps without a draft."""
        self.chain.decay(steps)
        self.tree.decay(steps)

    def expected(self, shape: DraftShape, depth: int) -> float:
        """Return the expected number of accepted tokens of a draft of this shape, cut to `depth`."""
        return self._of(shape).expected(depth)

    def _of(self, shape: DraftShape) -> Acceptance:
        return self.tree if shape.topk > 1 else self.chain
