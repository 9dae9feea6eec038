"""How much a batch that decodes on the device may take, for each row of it and in all."""

from dataclasses import dataclass

from specdec.draft.proposal import Shape

IN_FLIGHT = 2
"""Steps that are under way at once, for one of which the host waits."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a batch may get."""

    rows: int
    nodes: int
    """Of a window, the root included."""
    path: int
    """Of the longest accepted path, the root included."""
    drafts: int
    """Positions that a head writes behind a window while it drafts."""

    @classmethod
    def of(cls, rows: int, bounds: Shape | None, *, looks: bool) -> "Extent":
        """Measure what drafts within these bounds need; None: there are no drafters.

        What is looked up goes as deep as a window has nodes, a head no deeper than it has steps.
        """
        if bounds is None:
            return cls(rows, 1, 1, 0)
        nodes = bounds.num_draft_tokens
        path = nodes if looks else min(nodes, bounds.num_steps + 1)
        return cls(rows, nodes, path, max(nodes, bounds.topk * bounds.num_steps))

    @property
    def ahead(self) -> int:
        """Count the positions behind what the host knows of that steps under way may write."""
        return (IN_FLIGHT + 2) * self.nodes + self.drafts

    @property
    def records(self) -> int:
        """Count the records that a row borrows: two windows', beside the path that it came with."""
        return 2 * self.nodes + self.path if self.nodes > 1 else 0

    @property
    def snapshots(self) -> int:
        """Count the states that a row borrows, beside its own."""
        return self.nodes if self.nodes > 1 else 0
