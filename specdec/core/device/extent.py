"""Size limits of a batch decoded on the device."""

from dataclasses import dataclass

from specdec.draft.proposal import DraftShape

IN_FLIGHT = 2
"""Maximum steps in flight; the host waits for the oldest."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Maximum rows, window width, accepted path and draft positions."""

    rows: int
    nodes: int
    """Nodes of a window, the root included."""
    path: int
    """Nodes of the longest accepted path, the root included."""
    drafts: int
    """KV positions that a head writes after a window while drafting."""

    @classmethod
    def of(cls, rows: int, bounds: DraftShape | None, *, looks: bool, written: int = 0) -> "Extent":
        """Return the limits for drafts within these bounds; None: no drafters.

        Look-ups may be as deep as a window has nodes, a head's drafts as deep as it has steps. `written` are
        the positions that a head writes while it drafts.
        """
        if bounds is None:
            return cls(rows, 1, 1, 0)
        nodes = bounds.num_draft_tokens
        path = nodes if looks else min(nodes, bounds.num_steps + 1)
        return cls(rows, nodes, path, max(nodes, written))

    @property
    def ahead(self) -> int:
        """Positions after the host's known length that steps in flight may write."""
        return (IN_FLIGHT + 2) * self.nodes + self.drafts

    @property
    def records(self) -> int:
        """Records that a row borrows: two windows', plus its initial path."""
        return 2 * self.nodes + self.path if self.nodes > 1 else 0

    @property
    def snapshots(self) -> int:
        """State slots that a row borrows, besides its own."""
        return self.nodes if self.nodes > 1 else 0
