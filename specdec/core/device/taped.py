"""Steps recorded once for a number of rows and a key, then played in one call: what graphs are on a GPU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.core.device.rows import Rows
from specdec.core.device.step import DeviceStep
from specdec.core.request import Request
from specdec.kernels.native.tape import REFUSED, Tape, Tapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TapedStep:
    """A step over the live rows, and where it writes its result."""

    tape: Tape
    result_BX: Tensor


class TapedSteps:
    """Owns the tapes. What cannot be taped, for it asks what a tensor holds or keeps too much, runs once."""

    def __init__(self, step: DeviceStep, rows: Rows) -> None:
        self.step, self.rows = step, rows
        self._tapes: Tapes[TapedStep] = Tapes()
        self._refused = set[int]()

    def size(self, count: int) -> int:
        """Take no row more than there are."""
        return count

    def serves(self, requests: Sequence[Request]) -> bool:
        """Tell whether steps of these were not found to be the host's, as those are that filter."""
        filters = any(own.chooser.rule.is_filtered for own in requests)
        return not filters and len(requests) not in self._refused

    def __call__(self, key: GraphKey, size: int) -> Tensor:
        """Run a step over the first `size` rows."""
        known = self._tapes.of((key, size))
        if isinstance(known, TapedStep):
            known.tape.play()
            return known.result_BX.clone()
        rows = self.rows.part(0, size)
        self.step.arena.first_passes += 1
        with Tape() as tape:
            result_BX = self.step(rows, key)
        self._tapes.keep((key, size), TapedStep(tape, result_BX))
        if self._tapes.of((key, size)) is REFUSED:
            logger.info("steps of %d rows are the host's: %s", size, tape.refused or "they keep too much")
            self._refused.add(size)
        return result_BX.clone()

    @torch.inference_mode()
    def record(self, keys: Sequence[GraphKey]) -> bool:
        """Record every key for a single row, which is padding yet; tell whether all can be played."""
        for key in keys:
            self(key, 1)
        return not self._refused
