"""How steps over the first rows of a batch run: here as they stand; subclasses replay recorded ones."""

from collections.abc import Sequence

from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.core.device.rows import Rows
from specdec.core.device.step import DeviceStep
from specdec.core.request import Request


class Steps:
    """Runs every step eagerly; a subclass overrides what it does otherwise."""

    pads = True
    """Whether drafts of several rows are worth padding to the widest; the host does not pad."""

    def __init__(self, step: DeviceStep, rows: Rows) -> None:
        self.step, self.rows = step, rows

    def size(self, count: int) -> int:
        """Return how many rows run for this many requests."""
        return count

    def refusal(self, requests: Sequence[Request]) -> str | None:
        """Return why steps of these are better left to the host; None: they are worth running here."""
        return None

    def prepare(self) -> bool:
        """Record a step ahead of its first use, while no request runs; return False when none is left."""
        return False

    def __call__(self, key: GraphKey, size: int) -> Tensor:
        """Run a step over the first `size` rows."""
        return self.step(self.rows.part(0, size), key)

    def prefill_drafter(self, key: GraphKey, size: int) -> None:
        """Read all that the head has not read, and draft the first windows."""
        self.step.prefill_drafter(self.rows.part(0, size), key)
