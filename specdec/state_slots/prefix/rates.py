"""How fast memory is copied between tiers and how fast prompts are read: what is worth being fetched."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from specdec.state_slots.arena import Arena

RECENT = 0.2
"""Weight of the newest measurement."""
UNREAD = 64
"""Copies whose times are waited for at most; older ones are left out."""


class Mark(Protocol):
    """A moment in the order of a device's work, which may be still to come."""

    def passed(self) -> bool: ...

    def seconds_since(self, earlier: Self) -> float: ...


class HostMark:
    """The present: what the host does is done when it goes on."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Self) -> float:
        return self._at_s - earlier._at_s


class DeviceMark:
    """A place in a GPU's stream: what stood in it before is in no time between two of them."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def mark(*arenas: Arena) -> Mark:
    """Mark the present place in the work of the device that copies between these arenas."""
    device = next((arena.data.device for arena in arenas if arena.data.is_cuda), None)
    return DeviceMark(device) if device else HostMark()


class Copied(NamedTuple):
    """A copy between two tiers that was begun, and may be under way."""

    start: Mark
    end: Mark
    num_bytes: int


class Rates:
    """Measured on the way, of copies in either direction and of steps that only prefill.

    A copy is begun and not waited for: all that touches the memory of either tier is work of one stream, in
    order. Its time is read when it is over.
    """

    def __init__(self, mark: Callable[..., Mark] = mark) -> None:
        self._mark = mark
        self._begun: deque[Copied] = deque(maxlen=UNREAD)
        self._copied_s: float | None = None
        self.read_s: float | None = None
        """Seconds for an operation of the model in prefill."""

    @property
    def copied_s(self) -> float | None:
        """Seconds for a byte, by the copies that are over."""
        while self._begun and self._begun[0].end.passed():
            start, end, num_bytes = self._begun.popleft()
            self._copied_s = _mean(self._copied_s, end.seconds_since(start) / num_bytes)
        return self._copied_s

    def pays(self, copied_bytes: int, work: float) -> bool:
        """Return whether copying takes less time than computing; until both were measured it is tried."""
        copied_s = self.copied_s
        if copied_s is None or self.read_s is None:
            return True
        return copied_bytes * copied_s < work * self.read_s

    def observe_copy(self, copied_bytes: int, seconds: float) -> None:
        """Add a copy that another has made and timed."""
        self._copied_s = _mean(self._copied_s, seconds / max(copied_bytes, 1))

    def doubt(self) -> None:
        """Think a little better of copies where none was tried: nothing else would tell when they pay."""
        if self._copied_s is not None:
            self._copied_s *= 1 - RECENT

    def observe_reading(self, work: float, seconds: float) -> None:
        """Add the time of a step that only prefilled."""
        if work > 0:
            self.read_s = _mean(self.read_s, seconds / work)

    @contextlib.contextmanager
    def copying(self, source: Arena, to: Arena) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Copy the pairs that are collected in here; between two tiers the time is taken."""
        pairs: list[tuple[Tensor, Tensor]] = []
        yield pairs
        start = self._mark(source, to) if source is not to and pairs else None
        for own_X, other_X in pairs:
            other_X.copy_(own_X, non_blocking=True)
        if start:
            copied = sum(own_X.numel() for own_X, _ in pairs)
            self._begun.append(Copied(start, self._mark(source, to), copied))


def _mean(before: float | None, now: float) -> float:
    return now if before is None else (1 - RECENT) * before + RECENT * now
