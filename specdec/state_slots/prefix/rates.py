"""How fast memory is copied between tiers and how fast prompts are read: what is worth being fetched."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.state_slots.arena import Arena

RECENT = 0.2
"""Weight of the newest measurement."""


class Rates:
    """Measured on the way, of copies in either direction and of steps that read prompts alone."""

    def __init__(self) -> None:
        self.copied_s: float | None = None
        """Seconds for a byte."""
        self.read_s: float | None = None
        """Seconds for an operation of the model while it reads prompts."""

    def pays(self, copied_bytes: int, work: float) -> bool:
        """Tell whether to copy takes less time than to read; until both were measured it is tried."""
        if self.copied_s is None or self.read_s is None:
            return True
        return copied_bytes * self.copied_s < work * self.read_s

    def observe_reading(self, work: float, seconds: float) -> None:
        """Hear of a step that did nothing but read prompts."""
        if work > 0:
            self.read_s = _mean(self.read_s, seconds / work)

    @contextlib.contextmanager
    def copying(self, source: Arena, to: Arena) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Copy the pairs that are collected in here; between two tiers the time is taken."""
        pairs: list[tuple[Tensor, Tensor]] = []
        yield pairs
        is_timed = source is not to and bool(pairs)
        if is_timed:
            _wait(source, to)  # for what was under way before
        start_s = time.perf_counter()
        for own_X, other_X in pairs:
            other_X.copy_(own_X, non_blocking=True)
        if not is_timed:
            return
        _wait(source, to)
        copied = sum(own_X.numel() for own_X, _ in pairs)
        self.copied_s = _mean(self.copied_s, (time.perf_counter() - start_s) / copied)


def _wait(*arenas: Arena) -> None:
    for arena in arenas:
        if arena.data.is_cuda:
            torch.cuda.synchronize(arena.data.device)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - RECENT) * before + RECENT * now
