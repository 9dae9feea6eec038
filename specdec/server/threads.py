"""Work in daemon threads, which do not delay the exit of the process."""

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
"""Threads of a pool; threads that run Python block each other."""
LONG_S = 0.05
"""CPU seconds of work after which its caller pauses, since it blocks the engine thread meanwhile."""
REST = 3.0
"""Seconds of pause per CPU second."""


async def run_in_thread(work: Callable[[], T], name: str) -> T:
    """Run work that may hang or take minutes in a daemon thread; cancelling stops the wait only."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    _start(lambda: _do(future, work), name)
    return await asyncio.wrap_future(future)


class ThreadPool:
    """At most `COUNT` daemon threads for client work, with a bounded queue. Owned by the event loop.

    Callers take turns, so one caller's queue only delays others by the work in progress. With `pauses`, a
    caller pauses after long work in proportion, so that streams continue in between.

    Cancelled work is dropped from the queue. A thread ends when the queue is empty.
    """

    def __init__(self, name: str, max_threads: int, *, pauses: bool = False) -> None:
        self.name, self.most, self._pauses = name, max_threads, pauses
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        """Non-empty queues by caller, in turn order."""
        self._pausing_until_s: dict[str, float] = {}
        """End of each caller's pause."""
        self._lock = threading.Condition()
        self._running = 0
        """Number of threads."""
        self._held = 0
        """Work waiting or in progress."""

    async def do(self, work: Callable[[], T], caller: str = "") -> T:
        """Run a caller's work in its turn; raise if the queue is full."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                _do(future, lambda: self._timed(work, caller))

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
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                if run in self._waiting.get(caller, ()):
                    self._take(caller, run)
                    self._held -= 1
            raise

    def _run(self) -> None:
        while run := self._next():
            run()
            del run  # it refers to a request's body and its result
            with self._lock:
                self._held -= 1

    def _timed(self, work: Callable[[], T], caller: str) -> T:
        """Run work and start its caller's pause before the result is visible."""
        start_s = time.thread_time()
        try:
            return work()
        finally:
            used_s = time.thread_time() - start_s
            if self._pauses and used_s > LONG_S:
                with self._lock:
                    begins_s = max(self._pausing_until_s.get(caller, 0.0), time.monotonic())
                    self._pausing_until_s[caller] = begins_s + REST * used_s

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next work of a caller that is not pausing; None: the queue is empty."""
        with self._lock:
            while self._waiting:
                now_s = time.monotonic()
                self._pausing_until_s = {
                    caller: until for caller, until in self._pausing_until_s.items() if until > now_s
                }
                for caller, calls in self._waiting.items():
                    if caller not in self._pausing_until_s:
                        run = calls[0]
                        self._take(caller, run)
                        return run
                self._lock.wait(min(self._pausing_until_s[caller] for caller in self._waiting) - now_s)
            self._running -= 1
            return None

    def _take(self, caller: str, run: Callable[[], None]) -> None:
        """Remove work from the queue, and move its caller to the end."""
        calls = self._waiting.pop(caller)
        calls.remove(run)
        if calls:
            self._waiting[caller] = calls


def _do(future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(done)


def _start(run: Callable[[], None], name: str) -> None:
    threading.Thread(target=run, name=f"specdec-{name}", daemon=True).start()
