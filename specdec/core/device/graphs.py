"""CUDA graphs of device steps, captured per row count and key."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.core.device.capture import Capturer
from specdec.core.device.graph_key import GraphKey
from specdec.core.device.rows import BatchRows
from specdec.core.device.step import DeviceStep
from specdec.core.device.steps import Steps

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Captured row counts; a batch runs at the next larger one, with padding."""
BUDGET = 0.1
"""Fraction of the free memory for graphs."""


class Graphs(Steps):
    """Owns the captured graphs. Steps without one, for lack of memory, run eagerly."""

    def __init__(self, step: DeviceStep, rows: BatchRows, make_rows: Callable[[], BatchRows]) -> None:
        super().__init__(step, rows)
        self.most = len(rows.length_B)
        self.sizes = sorted({min(size, self.most) for size in SIZES} | {self.most})
        self._make_rows = make_rows
        self._graphs: dict[tuple[GraphKey, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def size(self, count: int) -> int:
        """Return the captured row count for this many requests."""
        return next(size for size in self.sizes if size >= count)

    def __call__(self, key: GraphKey, size: int) -> Tensor:
        """Run a step over the first `size` rows; a graph overwrites its previous result."""
        captured = self._graphs.get((key, size))
        if captured is None:
            return super().__call__(key, size)
        graph, result_BX = captured
        graph.replay()
        return result_BX

    @torch.inference_mode()
    def capture(self, keys: Sequence[GraphKey]) -> None:
        """Capture every key in every size, the smallest first, where launch overhead weighs most.

        A failing key does not stop the others. Uncaptured steps are still warmed up, so nothing is compiled
        while requests wait.
        """
        device = self.rows.length_B.device
        scratch, capturer = self._make_rows(), Capturer(device, torch.cuda.graph_pool_handle())
        wanted = list(product(self.sizes, keys))
        free, _ = torch.cuda.mem_get_info(device)
        ended, is_full = set[GraphKey](), False
        for size, key in tqdm(wanted, desc="Capturing graphs", unit="graph", leave=False, disable=None):
            free_now, _ = torch.cuda.mem_get_info(device)
            if not is_full and free - free_now > BUDGET * free:
                is_full = True
                logger.warning(
                    "steps of %d rows and more run uncaptured: graphs took %d MiB, a tenth of what was free",
                    *(size, (free - free_now) >> 20),
                )
            try:
                capturer.warm(partial(self.warm, scratch, key, size))
                if not is_full and key not in ended:
                    live = self.rows.part(0, size)
                    self._graphs[key, size] = capturer(partial(self.step, live, key))
            except RuntimeError as error:  # also raised when memory runs out
                if key not in ended:
                    logger.warning("%s of %d rows and more run uncaptured: %s", key, size, error)
                ended.add(key)
        free_now, _ = torch.cuda.mem_get_info(device)
        used_mib = (free - free_now) >> 20
        logger.info("captured %d of %d graphs in %d MiB", len(self._graphs), len(wanted), used_mib)

    def warm(self, scratch: BatchRows, key: GraphKey, size: int) -> None:
        """Run a step over padding, which changes no live data.

        With the key that drafts nothing, the head's prefill is run once as well.
        """
        rows = scratch.part(0, size)
        self.step(rows, key)
        if key.shape is None:
            self.step.prefill_drafter(rows, key)
