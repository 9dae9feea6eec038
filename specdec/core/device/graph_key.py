"""What a step on the device is made for: there is one graph for each."""

from dataclasses import dataclass, replace

from specdec.draft.proposal import Shape


def width_of(shape: Shape) -> int:
    """Return the nodes of a window that is drafted in a shape: no more than it can grow."""
    return min(shape.num_draft_tokens, 1 + shape.topk + shape.topk * shape.topk * (shape.num_steps - 1))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A step that verifies windows of a width, and drafts the next ones."""

    nodes: int
    tree: bool
    """Whether nodes may branch; a chain needs no parents."""
    shape: Shape | None
    """What is drafted on the device; None: nothing."""
    reads: bool
    """Whether a head reads what was accepted, so that it can draft next."""
    filtered: bool
    """Whether tokens may be chosen by more than a temperature."""

    @classmethod
    def drafting(cls, shape: Shape | None, *, reads: bool, filtered: bool) -> "GraphKey":
        """Verify what was drafted in a shape, and draft the same anew."""
        if shape is None:
            return cls(1, False, None, reads, filtered)
        return cls(width_of(shape), shape.topk > 1, shape, True, filtered)

    def finding(self, nodes: int) -> "GraphKey":
        """Verify trees that were looked up beside what was drafted."""
        return replace(self, nodes=nodes, tree=True)

    @classmethod
    def given(cls, nodes: int, *, filtered: bool) -> "GraphKey":
        """Verify trees that the host has drafted."""
        return cls(nodes, nodes > 1, None, False, filtered)
