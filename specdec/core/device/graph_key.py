"""Keys of device steps; each key and row count has its own graph."""

from dataclasses import dataclass, replace

from specdec.draft.proposal import DraftShape


def width_of(shape: DraftShape) -> int:
    """Return the window width of a shape: at most the nodes it can grow."""
    return min(shape.num_draft_tokens, 1 + shape.topk + shape.topk * shape.topk * (shape.num_steps - 1))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A step that verifies windows of one width and drafts the next ones."""

    nodes: int
    tree: bool
    """Whether nodes may branch; chains need no parent indices."""
    shape: DraftShape | None
    """Shape drafted on the device; None: no drafting."""
    reads: bool
    """Whether the head processes accepted tokens, so that it can draft later."""
    filtered: bool
    """Whether sampling needs more than a temperature."""

    @classmethod
    def drafting(cls, shape: DraftShape | None, *, reads: bool, filtered: bool) -> "GraphKey":
        """Return the key that verifies and drafts the same shape."""
        if shape is None:
            return cls(1, False, None, reads, filtered)
        return cls(width_of(shape), shape.topk > 1, shape, True, filtered)

    def finding(self, nodes: int) -> "GraphKey":
        """Return the key that verifies look-up trees, besides drafting."""
        return replace(self, nodes=nodes, tree=True)

    @classmethod
    def given(cls, nodes: int, *, filtered: bool) -> "GraphKey":
        """Return the key that verifies trees drafted on the host."""
        return cls(nodes, nodes > 1, None, False, filtered)
