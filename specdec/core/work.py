"""How much work a step does while several callers run, so that no stream pauses for long.

Work is counted by what a model computes for tokens behind their context. How long it takes is learnt from the
steps: one that took too long lowers the limit to what would have fitted, and no step may do more than twice
the work that was seen to fit.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

STEP_S = 0.15
"""Seconds that a step beside another caller should take at most, by the clock that steps are compared by."""
LEAST = 64
"""Tokens without context whose work is never cut: a step reads all weights, fewer would hardly shorten it."""
MOST = 1e18
"""The limit of one caller alone."""


class WorkBudget:
    """Bounds the work of each step, and divides it among callers by weight. One alone is never bounded."""

    def __init__(self, work: Callable[[int], float]) -> None:
        """Count by `work(n)`, that of prefilling n tokens."""
        self._work = work
        self.limit = 4 * LEAST * work(1)
        self.total = 0.0
        """Work of this step so far."""
        self._held: defaultdict[str, float] = defaultdict(float)
        self._weights: Mapping[str, float] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """Reset the budget for a step with requests of these callers."""
        self.total, self._weights = 0.0, weights
        self._held.clear()

    def take(self, caller: str, tokens: int, context: int) -> int:
        """Return how many of a row's tokens are computed in this step, and count them.

        A caller may use what is left of the limit, and at least its share of it; the first row of each takes
        part in any case.
        """
        each = self._each(context)
        fitting = max(int(self._room(caller) / each), int(not self._held[caller]))
        taken = min(tokens, fitting)
        self._add(caller, taken * each)
        return taken

    def fits(self, caller: str, tokens: int, context: int) -> bool:
        """Count all of a draft's tokens if there is room for them; return whether there was."""
        work = tokens * self._each(context)
        if work > self._room(caller):
            return False
        self._add(caller, work)
        return True

    def _each(self, context: int) -> float:
        """Return the work of one token after this many."""
        return self._work(context + 1) - self._work(context)

    def _room(self, caller: str) -> float:
        if len(self._weights) <= 1:
            return MOST
        share = self.limit * self._weights[caller] / sum(self._weights.values())
        return max(self.limit - self.total, share - self._held[caller])

    def _add(self, caller: str, work: float) -> None:
        self._held[caller] += work
        self.total += work

    def observe(self, seconds: float) -> None:
        """Learn what this step took."""
        if not self.total:
            return
        fitting = self.total * STEP_S / max(seconds, 1e-6)
        if seconds > STEP_S:
            self.limit = max(fitting, LEAST * self._work(1))
        else:
            self.limit = max(self.limit, min(2 * self.total, fitting))
