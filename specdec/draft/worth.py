"""Track whether drafting pays, from measured steps, and budgets for trying it while it does not.

The unit is the plain step: the time of the same rows without drafts. So a slower machine or a larger batch
changes neither.
"""

import math
from dataclasses import dataclass

MOST = 4.0
"""Maximum trust: the loss after which drafting stops."""
START, EACH = 6.0, 0.5
"""Initial trust of the engine, and trust lent to new rows, whose text may be of another kind."""
PROVEN = 1.0
"""Trust that drafts must earn on a budget to become active again."""


@dataclass(slots=True)
class DraftWorth:
    """Trust in drafting: the accumulated gain of planned steps."""

    trust: float = START
    active: bool = True
    """Whether every step is planned; else only within a budget."""

    def note(self, net: float) -> None:
        """Add the plain steps a planned step has saved, or lost if negative."""
        self.trust = max(min(self.trust + net, max(self.trust, MOST)), 0.0)
        self.active = self.trust >= PROVEN if not self.active else self.trust > 0

    def lend(self) -> float:
        """Raise the trust to `EACH` for a batch with new rows; return the increase."""
        increase = max(EACH - self.trust, 0.0)
        self.trust, self.active = self.trust + increase, True
        return increase


@dataclass(slots=True)
class ProbeBudget:
    """A share of the time for work that is not expected to pay."""

    share: float
    debt: float = 0.0
    """Plain steps spent and not yet repaid."""

    def earn(self, steps: int) -> None:
        """Repay the share of this many steps; at most one step is saved up."""
        self.debt = max(self.debt - self.share * steps, -1.0)

    def spend(self, steps: float) -> None:
        """Charge this many plain steps."""
        self.debt = max(self.debt + steps, -1.0)

    @property
    def is_open(self) -> bool:
        return self.debt < 0

    def may_overdraw(self, steps_since_plan: int) -> bool:
        """Return whether overdrawing by at most one step is allowed, for work that may pay."""
        return self.debt - self.share * steps_since_plan < 1

    def wait(self) -> int:
        """Return the number of steps until the budget is open."""
        return math.floor(max(self.debt, 0.0) / self.share) + 1
