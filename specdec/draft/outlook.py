"""What was last decided about drafting, and why: figures that a person can be told."""

from dataclasses import dataclass

from specdec.draft.proposal import Shape


@dataclass(frozen=True, slots=True)
class Outlook:
    """The shape that looked best in the last plan, whether it is drafted, and what it was judged by."""

    drafts: bool
    shape: Shape | None
    """None: what was looked up alone."""
    tokens: float | None = None
    """What a row is expected to gain by a step in this shape, its own token included; None: it is fixed."""
    cost: float | None = None
    """What such a step takes, in steps without a draft."""
    active: bool = True
    """Drafting has paid of late; else it is tried now and then, on a budget."""

    @property
    def name(self) -> str:
        """Name the shape that runs."""
        return self._what if self.drafts else "none"

    @property
    def reason(self) -> str:
        """Explain the decision in a sentence."""
        if self.tokens is None or self.cost is None:
            return f"{self._what} is what was asked for, whether it pays or not: adaptive is off"
        costs = (
            f"{self._what} is expected to give {self.tokens:.2f} tokens a step, which takes {self.cost:.2f} x"
        )
        if self.drafts:
            return f"{costs} the time of a step without a draft"
        why = "" if self.tokens < self.cost or self.active else "; it was to pay before, and did not"
        return f"drafting is off: {costs} the time of one without{why}"

    @property
    def _what(self) -> str:
        shape = self.shape
        if shape is None:
            return "what is looked up"
        if shape.topk == 1:
            return f"a chain of {shape.num_steps}"
        return f"a tree of {shape.num_draft_tokens - 1}, {shape.num_steps} deep"
