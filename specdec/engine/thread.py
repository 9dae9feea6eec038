"""The engine thread: accepts requests, steps the loop, and recovers from failed steps."""

import atexit
import contextlib
import contextvars
import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from specdec.core.request import Request
from specdec.errors import CLOSED, EngineError, SpecdecError
from specdec.kernels.native.threads import dismiss_helpers
from specdec.setup.build import LoadedModel

logger = logging.getLogger(__name__)

T = TypeVar("T")


QUIET_S = 0.02
"""Minimum idle seconds before a step is recorded or memory is checked."""
QUIET_SLOT_S = 250e-6
"""Additional idle seconds per held slot, fifty times what checking it takes: requests wait meanwhile."""

BUILDING_ENDS_S = 2.0
"""Seconds for an abandoned build to end, which it can only between C calls such as loading a tensor."""


CALLERS_LEAVE_S = 2.0
"""Seconds on closing for other threads to leave C++; a call takes milliseconds."""


class GivenUp(BaseException):
    """Raised in the engine thread when its build is abandoned."""


class Worker:
    """Builds a model, and runs its loop until closed. `submit` and `cancel` are thread-safe.

    One thread does both, and dismisses its helper threads when idle: where two threads of a process have
    helpers, all helpers sleep after every operation, and waking them takes longer than most operations.
    """

    def __init__(self, build: Callable[[], LoadedModel]) -> None:
        """Block until the model is built; raises if the build fails."""
        built: Future[LoadedModel] = Future()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """Calls to run between steps."""
        self._ending, self._builds = threading.Lock(), True
        """Lock and flag: whether the build can still be interrupted; the thread does not end while it is
        held."""
        self._gate = threading.Lock()
        """Ensures that no call enters the inbox of a closed engine."""
        self._callers = 0
        """Number of threads in C++ or Rust calls for the engine."""
        self._process = os.getpid()
        """Process of the thread: a forked process has a copy of everything but threads."""
        self.fault: str | None = None
        """Reason why no request is accepted, or None."""
        self._step_start_s: float | None = None
        # Context variables of the builder, such as a name in log lines, also hold in the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, build, built), name="specdec-engine", daemon=True
        )
        try:
            self._thread.start()
            self.model = built.result()
        except BaseException:
            self.fault = "The engine was not built."  # an interrupted caller wants no engine
            self._inbox.put(_wake)
            if not (built.cancel() or built.done()):
                self._give_up_building()
            raise

    @property
    def step_seconds(self) -> float:
        """Seconds that the current step has taken so far; 0 between steps."""
        start_s = self._step_start_s
        return 0.0 if start_s is None else time.monotonic() - start_s

    @property
    def is_copy(self) -> bool:
        """Whether this process was forked from the one that runs the model."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raise in a forked process, which would wait for the thread or for a lock held at the fork."""
        if self.is_copy:
            raise EngineError(
                f"This engine runs in process {self._process}, of which this one, {os.getpid()}, is a fork; "
                "create a SpecEngine here, or start processes with multiprocessing's spawn."
            )

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Delay interpreter exit while a caller is in C++ or Rust; raise if the engine is closed.

        Python ends daemon threads by unwinding, to which C++ and Rust respond by aborting the process.
        """
        self.check_process()
        with self._gate:
            if self.fault:
                raise EngineError(self.fault)
            self._callers += 1
        try:
            yield
        finally:
            with self._gate:
                self._callers -= 1

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests that start in the same step, whatever the timing."""
        self._put(lambda: self._begin(requests))

    def flush(self, caller: str | None = None) -> "Future[None]":
        """Drop data cached from ended requests between two steps: all, or one caller's."""
        return self.between_steps(lambda: self._core.flush(caller))

    def rest(self) -> "Future[None]":
        """Preempt running requests between two steps, and release the arena's memory."""
        return self.between_steps(self._rest)

    def wake(self) -> "Future[None]":
        """Resume requests."""
        return self.between_steps(lambda: self._core.wake())

    def between_steps(self, work: Callable[[], T]) -> "Future[T]":
        """Run a function between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            # From here on its caller cannot cancel it; setting a cancelled future would stop the engine.
            if not done.set_running_or_notify_cancel():
                return
            if threading.current_thread() is not self._thread:  # it was abandoned, maybe within a step
                done.set_exception(EngineError(self.fault or CLOSED))
                return
            self._step_start_s = time.monotonic()
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
            self._step_start_s = None

        self._put(run)
        return done

    def _rest(self) -> None:
        """Rest; if that fails, recover by ending running requests and resetting memory, then rest."""
        self._core.check_may_rest()
        try:
            self._core.rest()
        except Exception as failure:
            logger.exception(
                "unloading the arena failed; running requests end with an error, and the engine continues"
            )
            self._core.recover(failure)
            self._core.rest()

    def _put(self, work: Callable[[], None]) -> None:
        self.check_process()
        with self._gate:
            if self.fault:
                raise EngineError(self.fault)
            self._inbox.put(work)

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancel requests between two steps; ended ones are ignored."""
        if not self.is_copy:
            self._inbox.put(partial(self._abort, frozenset(numbers)))

    def abandon(self, fault: str) -> None:
        """Refuse new requests and end all with an error, while the thread hangs in a step.

        Request lists are used as that step left them. If the step returns after all, the thread ends.
        """
        self._stop(fault)
        self._receive(wait=False)
        for request in self._core.requests:
            request.send(EngineError(fault))

    def close(self, timeout_s: float | None = None) -> bool:
        """End every request with an error, release memory, and join the thread; return whether it ended.

        In a forked process this does nothing: the engine runs in the original process.
        """
        if self.is_copy:
            return True
        self._stop(CLOSED)
        self._inbox.put(_wake)
        self._thread.join(timeout_s)
        until_s = time.monotonic() + CALLERS_LEAVE_S
        while self._callers and time.monotonic() < until_s:
            time.sleep(0.001)
        return not self._thread.is_alive()

    def _stop_with(self, error: SpecdecError) -> None:
        """Stop the thread with an error, unless a step has failed of the same cause and stops it."""

        def fail() -> None:
            if not self.fault:
                raise error

        self._inbox.put(fail)

    def _stop(self, fault: str) -> None:
        with self._gate:
            self.fault = self.fault or fault

    def _give_up_building(self) -> None:
        """Interrupt the build: the interpreter cannot exit around a thread in C++."""
        atexit.register(self._thread.join)
        with self._ending:
            # Once it has ended, its number may belong to another thread.
            if self._builds:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUp))
        self._thread.join(BUILDING_ENDS_S)
        if not self._thread.is_alive():
            atexit.unregister(self._thread.join)

    def _work(self, build: Callable[[], LoadedModel], built: "Future[LoadedModel]") -> None:
        with contextlib.suppress(GivenUp):
            try:
                if not built.set_running_or_notify_cancel():
                    return  # abandoned before it began
                try:
                    model = build()
                except BaseException as error:
                    built.set_exception(error)
                    return
                self._core = model.core
                model.loop.executor.watch(self._stop_with)
                built.set_result(model)
                del model, built, build
                self._run()
            finally:
                with self._ending:
                    self._builds = False

    def _run(self) -> None:
        reason = "The engine was closed while this request ran."
        device = self._core.loop.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels run on the thread's current device, not the tensors'
        is_proved = False
        try:
            while not self.fault:
                idle = not self._core.has_work
                quiet_s = max(QUIET_S, QUIET_SLOT_S * self._core.loop.arena.held)
                received = self._receive(wait=idle, limit_s=None if is_proved else quiet_s)
                if received:
                    self._attempt(self._core.step)
                    is_proved = False
                elif not self._attempt(self._core.prepare):
                    is_proved = self._attempt(self._core.check_idle)
        except GivenUp:
            raise  # the build ended at the moment of the interrupt
        except BaseException as failure:
            reason = f"The engine stopped: {failure!r}."
            self._stop(reason)
            logger.critical("the engine has stopped", exc_info=failure)
        finally:
            self._core.close()
            self._receive(wait=False)
            for fault in self._core.end_all(reason):
                logger.error("a request could not be released", exc_info=fault)

    def _attempt(self, step: Callable[[], bool | None]) -> bool:
        """Run a step; on failure, end the requests it may have corrupted and recover.

        Return False if it failed or had nothing to do.
        """
        self._step_start_s, done = time.monotonic(), False
        try:
            done = step() is not False
        except Exception as failure:
            logger.exception("a step failed; its requests end with an error, and the engine continues")
            self._core.recover(failure)
        self._step_start_s = None
        return done

    def _receive(self, *, wait: bool, limit_s: float | None = None) -> bool:
        """Run calls from other threads; with nothing to do, sleep until one arrives.

        Return False after `limit_s` without a call.
        """
        if wait and self._inbox.empty():
            dismiss_helpers()
        received = not wait
        while True:
            try:
                work = self._inbox.get(block=not received, timeout=limit_s)
            except queue.Empty:
                return received
            received = True
            work()

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._core.add_request(request)

    def _abort(self, numbers: Collection[int]) -> None:
        for request in self._core.requests:
            if request.number in numbers:
                self._core.abort(request)


def _wake() -> None:
    """Do nothing; it only wakes the thread."""
