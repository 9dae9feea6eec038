"""A semaphore whose slots no single caller can use up."""

import itertools
import threading
import time
from collections import Counter
from queue import Empty, SimpleQueue

LOOK_S = 0.05
"""Seconds between polls of a waiting thread."""


class Places:
    """Hand out `count` slots, at most `most` to one caller. Thread-safe.

    The waiter whose caller holds the fewest slots is next; ties go to the longest wait.
    """

    def __init__(self, count: int, most: int) -> None:
        self._count, self._most = count, most
        self._changed = threading.Condition()
        self._taken = Counter[str]()
        self._waiting: list[tuple[int, str]] = []
        self._numbers = itertools.count()
        self._returned = SimpleQueue[str]()

    def take(self, caller: str, limit_s: float) -> bool:
        """Wait for a slot up to a limit; return whether one was acquired."""
        until_s = time.monotonic() + limit_s
        with self._changed:
            own = next(self._numbers), caller
            self._waiting.append(own)
            try:
                while not (has_place := self._next() == own) and (left_s := until_s - time.monotonic()) > 0:
                    self._changed.wait(min(left_s, LOOK_S))
                self._taken[caller] += has_place
            finally:
                self._waiting.remove(own)
                self._changed.notify_all()
            return has_place

    def give_back(self, caller: str) -> None:
        """Release a caller's slot. Takes no lock: the garbage collector may call it anywhere."""
        self._returned.put(caller)

    def has_share(self, caller: str) -> bool:
        """Return whether a caller holds fewer slots than its maximum."""
        with self._changed:
            self._take_in()
            return self._taken[caller] < self._most

    def _take_in(self) -> None:
        try:
            while True:
                self._taken[self._returned.get_nowait()] -= 1
        except Empty:
            pass

    def _next(self) -> tuple[int, str] | None:
        self._take_in()
        if self._taken.total() >= self._count:
            return None
        able = (own for own in self._waiting if self._taken[own[1]] < self._most)
        return min(able, key=lambda own: (self._taken[own[1]], own[0]), default=None)
