"""Capture work as a CUDA graph, and go on as before where that fails."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
MENDED = (2, 12)
"""The first torch whose allocator is whole after a capture that failed."""


class Capturer:
    """Captures on one device, into one pool of memory; what fails leaves the stream as it was."""

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self.device, self.pool = device, pool
        self._home, self._aside = torch.cuda.current_stream(device), _stream(device)
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept, since the allocator of an older torch goes on asking them."""

    def warm(self, run: Callable[[], object]) -> None:
        """Run beside the stream, as a capture demands: what a first run compiles or sets up is there then."""
        self._aside.wait_stream(self._home)
        with torch.cuda.stream(self._aside):
            run()
        self._home.wait_stream(self._aside)

    def __call__(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Return the graph and what the run returned; raise RuntimeError where it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = run()
        except RuntimeError:
            self._failed.append(graph)
            # A capture that failed leaves its own stream behind as the current one.
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
