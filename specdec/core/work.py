"""How much work a step does while several callers run, so that no stream pauses for long.

Work is counted in tokens of context that are attended to. What a step of so much work takes is learnt from
the steps themselves: one that took too long lowers the limit to what would have fitted, and no step may do
more than twice the work that was seen to fit.
"""

from collections import defaultdict

STEP_S = 0.2
"""Seconds that a step beside another caller should take at most, by the clock that steps are compared by."""
TOKEN = 1024
"""Work of a token beside its attention. In `tiny` it is that of 1,700 tokens of context, on a CPU; a wrong
number costs a step that is too long or too short where contexts change."""
LEAST = 64 * TOKEN
"""Work that is never cut: a step reads all weights, so that fewer rows would hardly shorten it."""
MOST = 1e18
"""The limit of one caller alone."""


class WorkBudget:
    """Bounds the work of each step, and divides it among callers. One caller alone is never bounded."""

    def __init__(self) -> None:
        self.limit = float(4 * LEAST)
        self.total = 0.0
        """Work of this step so far."""
        self._held: defaultdict[str, float] = defaultdict(float)
        self._callers = 1

    def begin(self, callers: int) -> None:
        """Start a step of requests of so many callers."""
        self.total, self._callers = 0.0, callers
        self._held.clear()

    def take(self, caller: str, tokens: int, context: int) -> int:
        """Return how many of a row's tokens are computed in this step, and count them.

        A caller may use what is left of the limit, and at least its share of it; the first row of each takes
        part in any case.
        """
        each = context + TOKEN
        fitting = max(int(self._room(caller) / each), not self._held[caller])
        taken = min(tokens, fitting)
        self._add(caller, taken * each)
        return taken

    def fits(self, caller: str, tokens: int, context: int) -> bool:
        """Count all of a draft's tokens if there is room for them; return whether there was."""
        work = tokens * (context + TOKEN)
        if work > self._room(caller):
            return False
        self._add(caller, work)
        return True

    def _room(self, caller: str) -> float:
        if self._callers == 1:
            return MOST
        return max(self.limit - self.total, self.limit / self._callers - self._held[caller])

    def _add(self, caller: str, work: float) -> None:
        self._held[caller] += work
        self.total += work

    def observe(self, seconds: float) -> None:
        """Learn what this step took."""
        if not self.total:
            return
        fitting = self.total * STEP_S / max(seconds, 1e-6)
        if seconds > STEP_S:
            self.limit = max(fitting, LEAST)
        else:
            self.limit = max(self.limit, min(2 * self.total, fitting))
