"""Run steps over the first rows of a batch: eagerly here, replayed in subclasses."""

from collections.abc import Sequence

from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.core.device.rows import BatchRows
from specdec.core.device.step import DeviceStep
from specdec.core.request import Request


class Steps:
    """Runs every step eagerly. Base of graph and tape replay."""

    pads = True
    """Whether padding drafts of several rows to the widest pays; the host does not pad."""

    def __init__(self, step: DeviceStep, rows: BatchRows) -> None:
        self.step, self.rows = step, rows

    def size(self, count: int) -> int:
        """Return the row count used for this many requests."""
        return count

    def refusal(self, requests: Sequence[Request]) -> str | None:
        """Return why the host should run steps of these requests, or None."""
        return None

    def prepare(self) -> bool:
        """Record a step before its first use, while no request runs; return False when none is left."""
        return False

    def __call__(self, key: GraphKey, size: int) -> Tensor:
        """Run a step over the first `size` rows."""
        return self.step(self.rows.part(0, size), key)

    def prefill_drafter(self, key: GraphKey, size: int) -> None:
        """Catch up the head and draft the first windows."""
        self.step.prefill_drafter(self.rows.part(0, size), key)
