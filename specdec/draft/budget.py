"""The budget for drafts and plans that are not expected to pay.

The unit is the plain step: the time of the same rows without drafts. So a slower machine or a larger batch
changes nothing.
"""

import math
from dataclasses import dataclass

EXPLORED = 0.01
"""Fraction of the time for what is not expected to pay.

Not charged: a shape's first trial at a batch size, and steps without drafts that `REFRESH` their cost.
"""


@dataclass(slots=True)
class ProbeBudget:
    """A share of the time for one kind of work that is not expected to pay."""

    share: float
    debt: float = 0.0
    """Plain steps spent and not yet repaid; negative: saved up."""
    most: float = 1.0
    """Plain steps that can be saved up."""

    def earn(self, steps: float) -> None:
        """Repay the share of this many steps."""
        self.debt = max(self.debt - self.share * steps, -self.most)

    def spend(self, steps: float) -> None:
        """Charge this many plain steps."""
        self.debt = max(self.debt + steps, -self.most)

    @property
    def is_open(self) -> bool:
        return self.debt < 0

    def may_overdraw(self, steps_since_plan: int) -> bool:
        """Return whether overdrawing by at most one step is allowed, for work that may pay."""
        return self.debt - self.share * steps_since_plan < 1

    def wait(self) -> int:
        """Return the number of steps until the budget is open."""
        return math.floor(max(self.debt, 0.0) / self.share) + 1


class ExplorationBudget:
    """`EXPLORED` of the time of host steps in three parts, and of device steps.

    Host steps are divided because one probe after a long pause costs hundreds of steps, in which the head
    catches up: with one debt for all, no look-up and no new row would be tried until it is repaid.
    """

    def __init__(self) -> None:
        self.probes = ProbeBudget(0.3 * EXPLORED)
        """For drafts that are not expected to pay."""
        self.look_ups = ProbeBudget(0.3 * EXPLORED)
        """For plans and look-ups while these have not paid."""
        self.new_rows = ProbeBudget(0.4 * EXPLORED)
        """For plans for new rows, in addition to what drafts have earned."""
        self.trials = ProbeBudget(EXPLORED, most=math.inf)
        """For other shapes in steps of the device, saved up before each trial of several steps."""

    def earn(self, steps: int) -> None:
        """Repay the shares of this many host steps."""
        for budget in (self.probes, self.look_ups, self.new_rows):
            budget.earn(steps)
