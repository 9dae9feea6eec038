"""The last drafting decision and its reason, for statistics and the user."""

from dataclasses import dataclass

from specdec.draft.proposal import DraftShape


@dataclass(frozen=True, slots=True)
class DraftDecision:
    """The best shape of the last plan, whether it is drafted, and the estimates it was judged by."""

    drafts: bool
    shape: DraftShape | None
    """None: look-ups only."""
    tokens: float | None = None
    """Expected tokens per row and step in this shape, the target's own included; None: the shape is fixed."""
    cost: float | None = None
    """Cost of such a step, in steps without a draft."""
    active: bool = True
    """False while drafting has not paid recently and is only probed on a budget."""
    looked_up: bool = False
    """The draft includes text that was looked up."""

    @property
    def name(self) -> str:
        """Return the name of the shape in use."""
        return self._what if self.drafts else "none"

    @property
    def reason(self) -> str:
        """Return a sentence that explains the decision."""
        if self.tokens is None or self.cost is None:
            return f"{self._what} in every step, whether it pays or not: adaptive is off"
        gain = f"{self.tokens:.2f} tokens per step, at {self.cost:.2f} x the time of a step without drafts"
        if self.drafts:
            return f"{self._what} is expected to give {gain}"
        note = "" if self.tokens < self.cost or self.active else "; similar estimates were too high recently"
        return f"drafting is off: {self._what} would give {gain}{note}"

    @property
    def _what(self) -> str:
        shape = self.shape
        if shape is None:
            return "a looked-up draft"
        chain, tree = (
            f"a chain of {shape.num_steps}",
            f"a tree of {shape.num_draft_tokens - 1}, {shape.num_steps} deep",
        )
        return (chain if shape.topk == 1 else tree) + " with a looked-up draft" * self.looked_up
