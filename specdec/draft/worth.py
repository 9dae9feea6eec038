"""Whether drafting has paid of late, by what steps really gave; and what may be spent where it has not.

Both count in plain steps: the time that the same rows take without any draft. So a machine that gets slower,
or a larger batch, changes neither.
"""

import math
from dataclasses import dataclass

MOST = 4.0
"""What drafts can have earned at most: that is lost before it shows that they no longer pay."""
START, EACH = 6.0, 0.5
"""What an engine lends its first drafts, and those of new rows: their text may be of another kind."""
PROVEN = 1.0
"""What drafts must have earned on their budget before they are made without one."""


@dataclass(slots=True)
class Worth:
    """Trust in planning, earned and lost by what planned steps came to."""

    trust: float = START
    active: bool = True
    """Plans are made for every step; else only as a budget allows."""

    def note(self, net: float) -> None:
        """Add how many plain steps a planned one has saved, or cost."""
        self.trust = max(min(self.trust + net, max(self.trust, MOST)), 0.0)
        self.active = self.trust >= PROVEN if not self.active else self.trust > 0

    def lend(self) -> float:
        """Raise the trust to `EACH` for a batch with new rows; return by how much."""
        lent = max(EACH - self.trust, 0.0)
        self.trust, self.active = self.trust + lent, True
        return lent


@dataclass(slots=True)
class Budget:
    """A share of the time, which may go into what is not expected to pay."""

    share: float
    debt: float = 0.0
    """Spent, and not made up for by the steps since."""

    def earn(self, steps: int) -> None:
        """Earn the share of this many steps; at most one step is saved up."""
        self.debt = max(self.debt - self.share * steps, -1.0)

    def spend(self, steps: float) -> None:
        """Spend the time of this many plain steps."""
        self.debt = max(self.debt + steps, -1.0)

    @property
    def is_open(self) -> bool:
        return self.debt < 0

    def may_overdraw(self, steps_since_plan: int) -> bool:
        """Return whether it can be overdrawn for what may pay: by one step at most."""
        return self.debt - self.share * steps_since_plan < 1

    def wait(self) -> int:
        """Return in how many steps the budget is open again."""
        return math.floor(max(self.debt, 0.0) / self.share) + 1
