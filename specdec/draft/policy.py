"""The draft policy: the most expected tokens per expected second, and one budget for trying other options.

Steps of the host (`planner.py`) and of the device (`chooser.py`) share one policy. They list the options of a
step with costs of one model (`costs.py`), and try others on the policy's budget (`budget.py`).
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from specdec.draft.budget import ExplorationBudget
from specdec.draft.decision import DraftDecision
from specdec.draft.proposal import DraftShape

MARGIN = 1.02
"""Minimum gain over no draft, so that small estimation errors cost nothing."""
LEAST_S = 1e-9
"""Substitute for zero or unknown times."""


class DraftOption(NamedTuple):
    """A way to run a step: the shape, how many rows draft in it, and the expected tokens and seconds."""

    rate: float
    shape: DraftShape | None
    rows: int
    tokens: float
    seconds: float

    @classmethod
    def of(cls, shape: DraftShape | None, rows: int, tokens: float, seconds: float) -> "DraftOption":
        """Return the option with its rate."""
        return cls(rate(tokens, seconds), shape, rows, tokens, seconds)


class DraftPolicy:
    """Choose among no draft, chains, and the bounds; if not adaptive, always the bounds."""

    def __init__(self, bounds: DraftShape, *, adaptive: bool) -> None:
        self.bounds, self.adaptive = bounds, adaptive
        deepest = min(bounds.num_steps, bounds.num_draft_tokens - 1)
        chains = tuple(DraftShape(depth, 1, depth + 1) for depth in range(1, deepest + 1))
        self.shapes = chains if bounds.topk == 1 else (*chains, bounds)
        self.budget = ExplorationBudget()
        self.outlook = None if adaptive else DraftDecision(drafts=True, shape=bounds)
        """The last decision, for statistics; trials do not change it."""

    def best(self, options: Iterable[DraftOption]) -> DraftOption:
        """Return the option with the most expected tokens per expected second; ties go to the earlier."""
        return max(options, key=attrgetter("rate"))

    def note(
        self,
        option: DraftOption,
        rows: int,
        plain_s: float,
        *,
        pays: bool,
        active: bool = True,
        looked_up: bool = False,
    ) -> None:
        """Store the best option of a step of `rows`, which takes `plain_s` without drafts."""
        tokens, cost = option.tokens / rows, option.seconds / max(plain_s, LEAST_S)
        self.outlook = DraftDecision(pays and active, option.shape, tokens, cost, active, looked_up)


def rate(tokens: float, seconds: float) -> float:
    """Return tokens per second."""
    return tokens / max(seconds, LEAST_S)
