"""A router's view of one replica: requests in flight, pending prefill and cached prefixes."""

import asyncio
import time
from collections.abc import Callable, Sequence

from specdec.ray.prompts import Known, Prompt
from specdec.ray.rates import ASSUMED, START, Line, Measured, added, fitted


class Load:
    """Load of one replica. Owned by the event loop's thread; requests in flight change it."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.clock = name, clock
        """URL or replica id; the same in every router."""
        self.measured = Measured()
        self.in_flight = 0
        """Requests in flight from this router."""
        self.reading = 0
        """Bytes of their prompts that are not prefilled yet, as far as known."""
        self.waiting = 0.0
        """Requests waiting for memory or a slot, as reported by the replica."""
        self.arena = 0.0
        """Used fraction of the memory for sequences, as reported by the replica."""
        self.known = Known()


class Flight:
    """One request in flight at a replica, counted in its load until `end`; `line` estimates its prefill."""

    def __init__(self, load: Load, prompt: Prompt, line: Line) -> None:
        self.load = load
        self.hit = load.known.hit(prompt)
        self._unread = prompt.size - self.hit
        self._ahead = load.reading + self._unread
        self._start_s = load.clock()
        self._timer: asyncio.TimerHandle | None = None
        self._is_measured = prompt.is_streamed
        load.in_flight += 1
        load.reading += self._unread
        load.known.note(prompt)
        if not prompt.is_streamed:
            # Its first byte comes with the end of decoding, so the end of prefill is estimated.
            self._timer = asyncio.get_running_loop().call_later(line.at(self._ahead), self.end_reading)

    def begun(self, *, is_error: bool = False) -> float:
        """Record the first byte; return the seconds since sending.

        An error says nothing about prefill: a client without a key is refused at once.
        """
        now_s = self.load.clock()
        took_s = now_s - self._start_s
        if self._is_measured and not is_error:
            self.load.measured.add(self._ahead, took_s, now_s)
        self.end_reading()
        return took_s

    def end_reading(self) -> None:
        """Count its prompt as prefilled."""
        if self._timer:
            self._timer.cancel()
        self.load.reading -= self._unread
        self._unread = 0

    def end(self) -> None:
        """Remove it from the load; call it once."""
        self.end_reading()
        self.load.in_flight -= 1


def fit_lines(loads: Sequence[Load]) -> list[Line]:
    """Fit the time to first byte of each replica to recent measurements.

    Replicas with few measurements use those of all: one slow answer does not exclude a replica for good.
    """
    sums = [own.measured.sums(own.clock()) for own in loads]
    together = fitted(added(sums), START, ASSUMED)
    return [fitted(own, together) for own in sums]
