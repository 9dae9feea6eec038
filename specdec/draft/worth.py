"""Track whether drafting pays, from measured steps, in plain steps as the budget for trying it."""

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
