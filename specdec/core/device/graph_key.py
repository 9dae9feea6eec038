"""What a step on the device is made for: there is one graph for each."""

from dataclasses import dataclass

from specdec.draft.proposal import Shape


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A step that verifies windows of so many nodes, and drafts the next ones."""

    nodes: int
    tree: bool
    """Whether nodes may branch; a chain needs no parents."""
    shape: Shape | None
    """What is drafted on the device; None: nothing."""
    filtered: bool
    """Whether tokens may be chosen by more than a temperature."""

    @classmethod
    def drafting(cls, shape: Shape | None, *, filtered: bool) -> "GraphKey":
        """Verify what was drafted in a shape, and draft the same anew; no wider than what it can grow."""
        if shape is None:
            return cls(1, False, None, filtered)
        grown = 1 + shape.topk + shape.topk * shape.topk * (shape.num_steps - 1)
        return cls(min(shape.num_draft_tokens, grown), shape.topk > 1, shape, filtered)

    @classmethod
    def given(cls, nodes: int, *, filtered: bool) -> "GraphKey":
        """Verify trees that the host has drafted."""
        return cls(nodes, nodes > 1, None, filtered)
