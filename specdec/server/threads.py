"""Work in threads that nothing waits for when the process ends."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from specdec.server.failures import Failure

T = TypeVar("T")
COUNT = 2
"""Threads of a pool: those that run Python wait for each other."""
LONG_S = 0.05
"""CPU time of work after which its caller rests: the engine's thread waits for the interpreter meanwhile."""
REST = 3.0
"""Seconds of rest for each such second."""


async def apart(work: Callable[[], T], name: str) -> T:
    """Do work that may never end, or take minutes, in a daemon thread; who is cancelled waits no longer."""
    doing: Future[T] = Future()
    doing.set_running_or_notify_cancel()
    _start(lambda: _do(doing, work), name)
    return await asyncio.wrap_future(doing)


class Pool:
    """At most `COUNT` daemon threads for what clients ask, with a bounded queue. Owned by the event loop.

    Callers take turns, so that what one has waiting holds another up by what a thread is at alone. With
    `rests`, after long work a caller's next waits in proportion, so that streams go on between the two.

    A client that leaves before its work has begun takes it along. A thread ends when nothing waits.
    """

    def __init__(self, name: str, most: int, *, rests: bool = False) -> None:
        self.name, self.most, self._rests = name, most, rests
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """By caller, in the order of their turns; each has some."""
        self._resting: dict[str, float] = {}
        """Until when callers rest."""
        self._lock = threading.Condition()
        self._running = 0
        """Threads."""
        self._held = 0
        """What waits, and what a thread is at."""

    async def do(self, work: Callable[[], T], caller: str = "") -> T:
        """Do a caller's work in its turn; refuse it where too much waits."""
        doing: Future[T] = Future()

        def run() -> None:
            if doing.set_running_or_notify_cancel():
                _do(doing, lambda: self._timed(work, caller))

        with self._lock:
            if self._held >= COUNT + self.most:
                raise Failure(
                    503,
                    f"{self.most:,} requests are waiting to be parsed; try again later.",
                    code="too_many_requests",
                    headers={"Retry-After": "1"},
                )
            if self._running < COUNT:
                _start(self._run, self.name)
                self._running += 1
            self._held += 1
            self._waiting.setdefault(caller, deque()).append(run)
            self._lock.notify()
        try:
            return await asyncio.wrap_future(doing)
        except asyncio.CancelledError:
            with self._lock:
                if run in self._waiting.get(caller, ()):
                    self._take(caller, run)
                    self._held -= 1
            raise

    def _run(self) -> None:
        while run := self._next():
            run()
            del run  # it refers to a request's body, and to what came of it
            with self._lock:
                self._held -= 1

    def _timed(self, work: Callable[[], T], caller: str) -> T:
        """Do work, and let its caller rest after it, before anyone hears that it is done."""
        start_s = time.thread_time()
        try:
            return work()
        finally:
            used_s = time.thread_time() - start_s
            if self._rests and used_s > LONG_S:
                with self._lock:
                    begins_s = max(self._resting.get(caller, 0.0), time.monotonic())
                    self._resting[caller] = begins_s + REST * used_s

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next work of a caller that does not rest; None: there is none."""
        with self._lock:
            while self._waiting:
                now_s = time.monotonic()
                self._resting = {caller: until for caller, until in self._resting.items() if until > now_s}
                for caller, own in self._waiting.items():
                    if caller not in self._resting:
                        run = own[0]
                        self._take(caller, run)
                        return run
                self._lock.wait(min(self._resting[caller] for caller in self._waiting) - now_s)
            self._running -= 1
            return None

    def _take(self, caller: str, run: Callable[[], None]) -> None:
        """Take out what waits, and put its caller behind the others."""
        own = self._waiting.pop(caller)
        own.remove(run)
        if own:
            self._waiting[caller] = own


def _do(doing: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done = work()
    except BaseException as error:
        doing.set_exception(error)
    else:
        doing.set_result(done)


def _start(run: Callable[[], None], name: str) -> None:
    threading.Thread(target=run, name=f"specdec-{name}", daemon=True).start()
