"""Capture CUDA graphs, and recover the stream when a capture fails."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
MENDED = (2, 12)
"""First torch version whose allocator stays intact after a failed capture."""


class Capturer:
    """Captures graphs on one device into one memory pool; a failed capture restores the stream."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.pool = device, pool
        self._home, self._aside = torch.cuda.current_stream(device), _stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept alive: the allocator of older torch versions still refers to them."""

    def warm(self, run: Callable[[], object]) -> None:
        """Run on a side stream, as capturing requires; this compiles and sets up what the capture needs."""
        self._aside.wait_stream(self._home)
        with torch.cuda.stream(self._aside):
            run()
        self._home.wait_stream(self._aside)

    def __call__(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return the graph and the result of `run`; raise RuntimeError if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = run()
        except RuntimeError:
            self._failed.append(graph)
            # A failed capture leaves its own stream as the current one.
            torch.cuda.set_stream(self._home)
            torch.cuda.synchronize(self.device)
            if tuple(map(int, torch.__version__.split(".")[:2])) < MENDED:
                logger.warning(
                    "after a capture that failed, the allocator of torch %s gives no cached memory back: "
                    "restart where memory is short, or use torch %d.%d",
                    *(torch.__version__, *MENDED),
                )
            raise
        return graph, result


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
