"""What a step on the device is made for: there is one graph for each."""

from dataclasses import dataclass

from specdec.draft.proposal import Shape


@dataclass(frozen=True, slots=True)
class Form:
    """A step that verifies windows of a shape, and drafts the next ones in it."""

    shape: Shape | None
    """None: nothing is drafted, and every window is its root."""
    greedy: bool
    """Whether no row has a temperature."""

    @property
    def nodes(self) -> int:
        """Say how wide the windows are: no wider than what the shape can grow."""
        if self.shape is None:
            return 1
        steps, topk = self.shape.num_steps, self.shape.topk
        return min(self.shape.num_draft_tokens, 1 + topk + topk * topk * (steps - 1))

    @property
    def tree(self) -> bool:
        return self.shape is not None and self.shape.topk > 1
