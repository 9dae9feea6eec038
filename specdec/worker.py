"""The one thread that owns the model: takes requests in, steps the loop, survives a step that fails."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from specdec.build import Model
from specdec.errors import EngineError
from specdec.kernels.native.threads import dismiss_helpers
from specdec.request import Request

logger = logging.getLogger(__name__)


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
        self._gate = threading.Lock()
        """Holds `submit` and `close` apart, so that no request enters a closed inbox."""
        self._closing = False
        self._thread = threading.Thread(
            target=self._build, args=(make, built), name="specdec-engine", daemon=True
        )
        self._thread.start()
        try:
            self.model = built.result()
        except BaseException:
            self._closing = True  # who was interrupted while it loads wants no engine
            raise

    @property
    def is_alive(self) -> bool:
        return not self._closing and self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin some requests in one step: what a step computes together must not hang on the clock."""
        self._put(lambda: self._begin(requests))

    def flush(self) -> None:
        """Forget what ended requests left, and return once that is done."""
        done: Future[None] = Future()

        def flush() -> None:
            try:
                self._loop.speculation.flush()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._put(flush)
        done.result()

    def _put(self, work: Callable[[], None]) -> None:
        with self._gate:
            if self._closing:
                raise EngineError("The engine is closed; create a new SpecEngine.")
            self._inbox.put(work)

    def cancel(self, request: Request) -> None:
        """End a request between two steps; one that has already ended is left alone."""
        request.cancelled = True
        self._inbox.put(_wake)

    def close(self) -> None:
        """End every request with an error, give the memory back, and wait for the thread."""
        with self._gate:
            self._closing = True
        self._inbox.put(_wake)
        self._thread.join()

    def _build(self, make: Callable[[], Model], built: "Future[Model]") -> None:
        try:
            model = make()
        except BaseException as error:
            built.set_exception(error)
            return
        self._loop = model.loop
        built.set_result(model)
        del model, built, make
        self._run()

    def _run(self) -> None:
        error = EngineError("The engine was closed while this request ran.")
        if self._loop.device.type == "cuda":
            torch.cuda.set_device(self._loop.device)  # kernels go to the thread's device, not to the tensors'
        try:
            while not self._closing:
                self._receive(wait=not self._loop.scheduler.has_work)
                self._step()
        except BaseException as fault:
            error = EngineError(f"The engine stopped: {fault!r}.")
            raise
        finally:
            with self._gate:
                self._closing = True
            self._receive(wait=False)
            scheduler = self._loop.scheduler
            self._fail((*scheduler.running, *scheduler.waiting), error)

    def _step(self) -> None:
        scheduler = self._loop.scheduler
        try:
            self._loop.step()
            if not scheduler.has_work:
                self._loop.arena.check_integrity()
        except Exception as error:  # what a step raises ends the requests that were in it, not the engine
            logger.exception("a step failed")
            taking_part = scheduler.running or list(scheduler.waiting)[:1]
            self._fail(taking_part, EngineError(f"The engine failed while this request ran: {error!r}."))

    def _receive(self, *, wait: bool) -> None:
        """Do what other threads want done; with nothing to do, sleep until something comes."""
        if wait and self._inbox.empty():
            dismiss_helpers()
        while wait or not self._inbox.empty():
            work = self._inbox.get()
            wait = False
            work()

    def _begin(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._loop.scheduler.submit(request)

    def _fail(self, requests: Iterable[Request], error: EngineError) -> None:
        """End each of the requests; what goes wrong with one keeps no other waiting."""
        for request in tuple(requests):
            try:
                self._loop.scheduler.release(request)
            except Exception:
                logger.exception("request %d could not be released", request.number)
            request.fail(error)


def _wake() -> None:
    """Do nothing: that something came is enough."""
