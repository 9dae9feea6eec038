"""Measured speeds of copies between tiers and of prefill, which decide whether fetching pays."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch

from specdec.state_slots.arena import Arena, SlotPair

RECENT = 0.2
"""Weight of the newest measurement."""
UNREAD = 64
"""Maximum copies with pending times; older ones are dropped."""


class TimeMark(Protocol):
    """A point in a device's order of work, possibly still pending."""

    def passed(self) -> bool: ...

    def seconds_since(self, earlier: Self) -> float: ...


class HostMark:
    """The current time: host work is synchronous."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Self) -> float:
        return self._at_s - earlier._at_s


class DeviceMark:
    """A point in a GPU's stream; times between two points exclude earlier work."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Self) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def mark(*arenas: Arena) -> TimeMark:
    """Return a mark at the current point of the device that copies between these arenas."""
    device = next((arena.data.device for arena in arenas if arena.data.is_cuda), None)
    return DeviceMark(device) if device else HostMark()


class TierCopy(NamedTuple):
    """A copy between two tiers, possibly in flight."""

    start: TimeMark
    end: TimeMark
    num_bytes: int


class TierRates:
    """Rates of copies in either direction and of prefill-only steps, measured in operation.

    Copies are started without waiting: all work on either tier's memory is in one stream, in order. A copy's
    time is read once it has finished.
    """

    def __init__(self, mark: Callable[..., TimeMark] = mark) -> None:
        self._mark = mark
        self._begun: deque[TierCopy] = deque(maxlen=UNREAD)
        self._copied_s: float | None = None
        self.read_s: float | None = None
        """Seconds per model operation in prefill."""

    @property
    def copied_s(self) -> float | None:
        """Seconds per byte, from finished copies."""
        while self._begun and self._begun[0].end.passed():
            start, end, num_bytes = self._begun.popleft()
            self._copied_s = _mean(self._copied_s, end.seconds_since(start) / num_bytes)
        return self._copied_s

    def pays(self, copied_bytes: int, work: float) -> bool:
        """Return whether copying takes less time than computing; True until both have been measured."""
        copied_s = self.copied_s
        if copied_s is None or self.read_s is None:
            return True
        return copied_bytes * copied_s < work * self.read_s

    def observe_copy(self, copied_bytes: int, seconds: float) -> None:
        """Add a copy timed elsewhere."""
        self._copied_s = _mean(self._copied_s, seconds / max(copied_bytes, 1))

    def doubt(self) -> None:
        """Lower the estimated copy time after a skipped copy, so that copies are eventually tried again."""
        if self._copied_s is not None:
            self._copied_s *= 1 - RECENT

    def observe_prefill(self, work: float, seconds: float) -> None:
        """Add the time of a prefill-only step."""
        if work > 0:
            self.read_s = _mean(self.read_s, seconds / work)

    def copy(
        self, source: Arena, to: Arena, blocks: Sequence[SlotPair] = (), states: Sequence[SlotPair] = ()
    ) -> None:
        """Copy slots; measure the time if it is between two tiers."""
        start = self._mark(source, to) if source is not to and (blocks or states) else None
        to.copy_from(source, blocks, states)
        if start:
            num_bytes = len(blocks) * to.layout.block_bytes + len(states) * to.layout.state_bytes
            self._begun.append(TierCopy(start, self._mark(source, to), num_bytes))


def _mean(mean: float | None, sample: float) -> float:
    return sample if mean is None else (1 - RECENT) * mean + RECENT * sample
