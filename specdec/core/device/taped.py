"""CPU steps recorded once per row count and key, then replayed in one call, like CUDA graphs."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey, width_of
from specdec.core.device.rows import BatchRows
from specdec.core.device.step import DeviceStep
from specdec.core.device.steps import Steps
from specdec.core.request import Request
from specdec.kernels.native.call import listening
from specdec.kernels.native.tape import REFUSED, Tape, Tapes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TapedStep:
    """A recorded step and its result tensor, if it has one."""

    tape: Tape
    result_BX: Tensor | None


class TapedSteps(Steps):
    """Owns the tapes. Steps that read tensors on the host, or are too large, are left to the host."""

    pads = False

    def __init__(self, step: DeviceStep, rows: BatchRows) -> None:
        super().__init__(step, rows)
        self._tapes: Tapes[TapedStep] = Tapes()
        self._refused = set[int]()
        self._planned = deque[GraphKey]()

    def refusal(self, requests: Sequence[Request]) -> str | None:
        """Return a reason if steps of this many rows cannot be taped."""
        return f"{len(requests)} rows, which cannot be taped" if len(requests) in self._refused else None

    def __call__(self, key: GraphKey, size: int) -> Tensor:
        """Run a step over the first `size` rows."""
        result_BX = self._run(("step", key, size), partial(super().__call__, key, size))
        assert result_BX is not None
        return result_BX.clone()

    def prefill_drafter(self, key: GraphKey, size: int) -> None:
        """Catch up the head and draft the first windows."""
        self._run(("prefill", key, size), partial(super().prefill_drafter, key, size))

    def _run(self, key: tuple[str, GraphKey, int], run: Callable[[], Tensor | None]) -> Tensor | None:
        """Replay a recorded step, or record it; a listener of kernel calls sees them all, unrecorded.

        Only `run` makes views of the rows: making and freeing them took 0.3 ms of each step.
        """
        if listening.recorder:
            return run()
        step = self._tapes.of(key)
        if isinstance(step, TapedStep):
            step.tape.play()
            return step.result_BX
        if step is REFUSED:
            return run()
        self.step.arena.first_passes += 1
        with Tape() as tape:
            result_BX = run()
        self._tapes.keep(key, TapedStep(tape, result_BX))
        if self._tapes.of(key) is REFUSED:
            *_, size = key
            logger.info(
                "steps of %d rows run on the host: %s",
                size,
                tape.refused or "their tapes take too much memory",
            )
            self._refused.add(size)
        return result_BX

    def plan(self, keys: Sequence[GraphKey]) -> bool:
        """Record the widest one-row step now and plan the others; return False if it cannot be replayed.

        A step used before it is prepared is recorded on that use.
        """
        widest = max(keys, key=lambda key: key.nodes)
        self._planned.extend([widest, *keys])
        self.prepare()
        return 1 not in self._refused

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Record one planned step of one padding row; return False when none is left.

        No request may be on the device.
        """
        while self._planned and 1 not in self._refused:
            key = self._planned.popleft()
            if self._tapes.of(("step", key, 1)):
                continue
            try:
                self(key, 1)
                if key.shape and key.nodes == width_of(key.shape):
                    self.prefill_drafter(key, 1)
            except Exception:
                logger.exception("recording a step ahead failed; steps are recorded as they are used")
                self._planned.clear()
            return True
        return False
