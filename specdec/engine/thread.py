"""The one thread that owns the model: takes requests in, steps the loop, survives a step that fails."""

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
from specdec.errors import CLOSED, EngineError
from specdec.kernels.native.threads import dismiss_helpers
from specdec.setup.build import Model

logger = logging.getLogger(__name__)

T = TypeVar("T")


QUIET_S = 0.02
"""Without work before a step is recorded, or memory proved to be whole, at least."""
QUIET_SLOT_S = 250e-6
"""As much for each slot that is held, fifty times what proving it takes: requests wait meanwhile."""

BUILDING_ENDS_S = 2.0
"""For a build that is given up to end where its thread comes back from C, as after the tensor being read."""


CALLERS_LEAVE_S = 2.0
"""For other threads to come out of C++ where the engine is closed: a call takes milliseconds."""


class GivenUp(BaseException):
    """Raised within a thread that builds what nothing waits for any more."""


class Worker:
    """Builds a model, and runs its loop until closed. `submit` and `cancel` may be called from any thread.

    One thread does both, and sends its helpers home when there is nothing to do: where two threads of a
    process keep some, all helpers sleep after every operation, and waking them takes longer than most.
    """

    def __init__(self, make: Callable[[], Model]) -> None:
        """Wait until the model is built; what is wrong with it is raised here."""
        built: Future[Model] = Future()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What is to be done between two steps."""
        self._ending, self._builds = threading.Lock(), True
        """Whether the thread can still be made to give up: it does not end in the meantime."""
        self._gate = threading.Lock()
        """Holds callers and what stops the engine apart, so that no request enters a closed inbox."""
        self._callers = 0
        """Threads that are in C++ for the engine."""
        self._process = os.getpid()
        """Where the thread runs: a process that is forked from it has a copy of everything but threads."""
        self.fault: str | None = None
        """Why no request is taken any more."""
        self._step_start_s: float | None = None
        # What a service has set where it builds the engine, as a name for its log lines, holds in the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, make, built), name="specdec-engine", daemon=True
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
        """How long the step that is under way has taken so far; 0 between two of them."""
        start_s = self._step_start_s
        return 0.0 if start_s is None else time.monotonic() - start_s

    @property
    def is_copy(self) -> bool:
        """Return whether this process was forked from the one whose thread runs the model."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse, in a copy, what would wait for the thread, or for a lock that was held when it was made."""
        if self.is_copy:
            raise EngineError(
                f"This engine runs in process {self._process}, of which this one, {os.getpid()}, is a fork; "
                "create a SpecEngine here, or start processes with multiprocessing's spawn."
            )

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Hold the end of the interpreter off while a caller is in C++ or Rust; refuse one that comes later.

        Python ends a daemon's thread by unwinding it, which these answer by aborting the process.
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
        """Begin some requests in one step: what a step computes together must not hang on the clock."""
        self._put(lambda: self._begin(requests))

    def flush(self, caller: str | None = None) -> "Future[None]":
        """Forget what ended requests left, or one caller's, between two steps."""
        return self.between_steps(lambda: self._core.flush(caller))

    def rest(self) -> "Future[None]":
        """Preempt what runs between two steps, and give the arena's bytes back."""
        return self.between_steps(self._rest)

    def wake(self) -> "Future[None]":
        """Run requests again."""
        return self.between_steps(lambda: self._core.wake())

    def between_steps(self, work: Callable[[], T]) -> "Future[T]":
        """Do something between two steps."""
        done: Future[T] = Future()

        def run() -> None:
            # From here on its caller cannot give it up: to tell it nothing would end the engine.
            if not done.set_running_or_notify_cancel():
                return
            if threading.current_thread() is not self._thread:  # it was abandoned, perhaps within a step
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
        """Rest; what fails on the way ends the requests that it may have spoilt, and memory begins afresh."""
        self._core.check_may_rest()
        try:
            self._core.rest()
        except Exception as failure:
            logger.exception(
                "resting failed; the requests that ran end with an error, and the engine goes on"
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
        """End some requests between two steps; those that have already ended are left alone."""
        if not self.is_copy:
            self._inbox.put(partial(self._abort, frozenset(numbers)))

    def abandon(self, fault: str) -> None:
        """Take no request any more and end all with an error, though the thread is in a step and stays there.

        Its lists are read as that step left them. Should it come back after all, the thread ends.
        """
        self._stop(fault)
        self._receive(wait=False)
        for request in self._core.requests:
            request.send(EngineError(fault))

    def close(self, timeout_s: float | None = None) -> bool:
        """End every request with an error, give memory back, and wait for the thread; tell if it ended.

        In a process that was forked there is nothing to end: the engine goes on in the other one.
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

    def _stop(self, fault: str) -> None:
        with self._gate:
            self.fault = self.fault or fault

    def _give_up_building(self) -> None:
        """End the thread that builds: around one that is in C++ the interpreter cannot be torn down."""
        atexit.register(self._thread.join)
        with self._ending:
            # Its number would be another thread's once it has ended.
            if self._builds:
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUp))
        self._thread.join(BUILDING_ENDS_S)
        if not self._thread.is_alive():
            atexit.unregister(self._thread.join)

    def _work(self, make: Callable[[], Model], built: "Future[Model]") -> None:
        with contextlib.suppress(GivenUp):
            try:
                if not built.set_running_or_notify_cancel():
                    return  # given up before it began
                try:
                    model = make()
                except BaseException as error:
                    built.set_exception(error)
                    return
                self._core = model.core
                built.set_result(model)
                del model, built, make
                self._run()
            finally:
                with self._ending:
                    self._builds = False

    def _run(self) -> None:
        why = "The engine was closed while this request ran."
        device = self._core.loop.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels go to the thread's device, not to the tensors'
        is_proved = False
        try:
            while not self.fault:
                idle = not self._core.has_work
                quiet_s = max(QUIET_S, QUIET_SLOT_S * self._core.loop.arena.held)
                came = self._receive(wait=idle, limit_s=None if is_proved else quiet_s)
                if came:
                    self._attempt(self._core.step)
                    is_proved = False
                elif not self._attempt(self._core.prepare):
                    is_proved = self._attempt(self._core.check_idle)
        except GivenUp:
            raise  # it came to be built in the very moment
        except BaseException as failure:
            why = f"The engine stopped: {failure!r}."
            self._stop(why)
            logger.critical("the engine has stopped", exc_info=failure)
        finally:
            self._core.close()
            self._receive(wait=False)
            for fault in self._core.end_all(why):
                logger.error("a request could not be released", exc_info=fault)

    def _attempt(self, step: Callable[[], bool | None]) -> bool:
        """Run a step; a failure ends the requests that it may have spoilt, not the engine.

        Return False if it failed or had nothing to do.
        """
        self._step_start_s, done = time.monotonic(), False
        try:
            done = step() is not False
        except Exception as failure:
            logger.exception("a step failed; its requests end with an error, and the engine goes on")
            self._core.recover(failure)
        self._step_start_s = None
        return done

    def _receive(self, *, wait: bool, limit_s: float | None = None) -> bool:
        """Do what other threads want done; with nothing to do, sleep until something comes.

        False: nothing has come in so long a time.
        """
        if wait and self._inbox.empty():
            dismiss_helpers()
        came = not wait
        while True:
            try:
                work = self._inbox.get(block=not came, timeout=limit_s)
            except queue.Empty:
                return came
            came = True
            work()

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._core.add_request(request)

    def _abort(self, numbers: Collection[int]) -> None:
        for request in self._core.requests:
            if request.number in numbers:
                self._core.abort(request)


def _wake() -> None:
    """Do nothing: that something came is enough."""
