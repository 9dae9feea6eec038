"""Bounds the work of steps shared by several callers, so that no stream pauses for long.

Work is the computation for tokens after their context. Its speed is learned from steps: a step that took too
long lowers the limit to the work that would have fitted, and no step may exceed twice the work known to fit.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping

STEP_S = 0.15
"""Target maximum seconds of a step shared by several callers, by the step clock."""
LEAST = 64
"""Minimum work in tokens without context: a step loads all weights, so fewer would hardly shorten it."""
MOST = 1e18
"""Limit for a single caller."""


class WorkBudget:
    """Bounds the work of each step, divided among callers by weight. A single caller is not bounded."""

    def __init__(self, work: Callable[[int], float]) -> None:
        """`work(n)` is the work of prefilling n tokens."""
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
        """Return and charge the number of a row's tokens to compute in this step.

        A caller may use the rest of the limit, and at least its share of it; its first row always takes part.
        """
        each = self._each(context)
        fitting = max(int(self._room(caller) / each), int(not self._held[caller]))
        count = min(tokens, fitting)
        self._add(caller, count * each)
        return count

    def fits(self, caller: str, tokens: int, context: int) -> bool:
        """Charge a draft's tokens if they fit; return whether they did."""
        work = tokens * self._each(context)
        if work > self._room(caller):
            return False
        self._add(caller, work)
        return True

    def _each(self, context: int) -> float:
        """Return the work of one token after this context."""
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
        """Update the limit from this step's time."""
        if not self.total:
            return
        fitting = self.total * STEP_S / max(seconds, 1e-6)
        if seconds > STEP_S:
            self.limit = max(fitting, LEAST * self._work(1))
        else:
            self.limit = max(self.limit, min(2 * self.total, fitting))
