"""The one thread that owns the model: takes requests in, steps the loop, survives a step that fails."""

import logging
import queue
import threading

from specdec.errors import EngineError
from specdec.loop import DecodeLoop
from specdec.request import Request

logger = logging.getLogger(__name__)


class Worker:
    """Runs a loop until it is closed. `submit` and `cancel` may be called from any thread."""

    def __init__(self, loop: DecodeLoop) -> None:
        self._loop = loop
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        """New requests; None only wakes the thread up."""
        self._gate = threading.Lock()
        """Holds `submit` and `close` apart, so that no request enters a closed inbox."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        with self._gate:
            if self._closing:
                raise EngineError("The engine is closed; create a new SpecEngine.")
            self._inbox.put(request)

    def cancel(self, request: Request) -> None:
        """End a request between two steps; one that has already ended is left alone."""
        request.cancelled = True
        self._inbox.put(None)

    def close(self) -> None:
        """End every request with an error, give the memory back, and wait for the thread."""
        with self._gate:
            self._closing = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        scheduler = self._loop.scheduler
        while not self._closing:
            self._receive(wait=not scheduler.has_work)
            try:
                self._loop.step()
                if not scheduler.has_work:
                    self._loop.arena.check_integrity()
            except Exception as error:  # whatever a step raises ends its requests, not the engine
                logger.exception("a step failed")
                self._fail_all(EngineError(f"The engine failed while this request ran: {error!r}."))
        self._receive(wait=False)
        self._fail_all(EngineError("The engine was closed while this request ran."))

    def _receive(self, *, wait: bool) -> None:
        """Hand new requests to the scheduler; with nothing to do, sleep until something comes."""
        while wait or not self._inbox.empty():
            request = self._inbox.get()
            wait = False
            if request is not None:
                self._loop.scheduler.submit(request)

    def _fail_all(self, error: EngineError) -> None:
        scheduler = self._loop.scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            scheduler.finish(request)
            request.fail(error)
