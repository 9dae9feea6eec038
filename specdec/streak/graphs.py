"""Steps captured once for a number of rows and a form, and replayed: no launches from the host, no gaps."""

import logging
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.streak.form import Form
from specdec.streak.rows import Rows
from specdec.streak.step import DeviceStep

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows that are captured; a batch runs as the next one up, filled with padding."""
BUDGET = 0.1
"""Part of the free memory that graphs may take."""


class Graphs:
    """Owns the captured graphs. What has none, since memory ran out, runs without."""

    def __init__(self, step: DeviceStep, rows: Rows, make_rows: Callable[[], Rows]) -> None:
        self.step, self.rows = step, rows
        self.most = len(rows.length_B)
        self.sizes = sorted({min(size, self.most) for size in SIZES} | {self.most})
        self._make_rows = make_rows
        self._graphs: dict[tuple[Form, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def size(self, count: int) -> int:
        """Return the captured number of rows that so many run as."""
        return next(size for size in self.sizes if size >= count)

    def __call__(self, form: Form, size: int) -> Tensor:
        """Run a step over the first `size` rows; a captured one writes its result where it always does."""
        captured = self._graphs.get((form, size))
        if captured is None:
            return self.step(self.rows.part(0, size), form)
        graph, result_BX = captured
        graph.replay()
        return result_BX

    @torch.inference_mode()
    def capture(self, forms: Sequence[Form]) -> None:
        """Capture every form in every size, the smallest first: those are what launches weigh on most."""
        device = self.rows.length_B.device
        scratch, pool, aside = self._make_rows(), torch.cuda.graph_pool_handle(), _stream()
        wanted = list(product(self.sizes, forms))
        free, _ = torch.cuda.mem_get_info(device)
        for size, form in tqdm(wanted, desc="Capturing graphs", unit="graph", leave=False, disable=None):
            left, _ = torch.cuda.mem_get_info(device)
            if free - left > BUDGET * free:
                break
            try:
                # Over padding: what a first run compiles or sets up is there, and nothing has changed.
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):
                    self.step(scratch.part(0, size), form)
                torch.cuda.current_stream().wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    result_BX = self.step(self.rows.part(0, size), form)
            except RuntimeError as error:  # torch's for memory that ran out is one too
                logger.warning("steps of %d rows and more run uncaptured: %s", size, error)
                break
            self._graphs[form, size] = graph, result_BX
        left, _ = torch.cuda.mem_get_info(device)
        taken = (free - left) >> 20
        logger.info("captured %d of %d graphs in %d MiB", len(self._graphs), len(wanted), taken)


def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
