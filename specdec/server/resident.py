"""One model of the process: its engine while it is loaded, and who waits for it."""

import asyncio
import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from specdec.config.engine import EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.errors import EngineError, SpecdecError
from specdec.server.failures import Failure
from specdec.state_slots.pages import release_heap

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds after which a model that could not be loaded is tried again, when it is asked for."""
POLL_S = 0.25
"""Seconds between two looks at an engine that something is awaited of: one that has failed says nothing."""


class Status(StrEnum):
    """Where a model is."""

    WARM = "warm"
    """It is loaded and has an arena."""
    RESTING = "resting"
    """It is loaded; its arena is another's."""
    LOADING = "loading"
    UNLOADED = "unloaded"
    FAILED = "failed"
    """It could not be loaded, or its engine has failed for good."""


class Work(Protocol):
    """Something that an engine was asked for."""

    @property
    def is_over(self) -> bool: ...


class Resident:
    """Owned by the event loop's thread."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        config: EngineConfig,
        *,
        weight_bytes: int = 0,
        keep_alive_s: float = -1.0,
        may_unload: bool = True,
    ) -> None:
        self.folder, self.names, self.config = folder, tuple(names), config
        self.weight_bytes, self.keep_alive_s = weight_bytes, keep_alive_s
        self.may_unload = may_unload
        """Whether requests may say how long it is kept."""
        self.engine: SpecEngine | None = None
        self.is_resting = self.is_loading = False
        self.is_draining = False
        """Whether no request enters: it is to be unloaded once those within have ended."""
        self.refusal: SpecdecError | None = None
        """Why it can never be loaded by this process."""
        self.failure: str | None = None
        """Why it could not be loaded the last time; the error itself would keep alive what was loaded."""
        self._failed_s = 0.0
        self.users = 0
        """Requests under way: it is not unloaded meanwhile."""
        self._answers: set[Work] = set()
        """What the engine was asked for."""
        self.at_gate = 0
        """Of the users, those that wait until it is loaded."""
        self.wanted_s: float | None = None
        """Since when a request waits for an arena; None: none does."""
        self.turn_s = 0.0
        """Since when it has had its turn: what was preempted has been computed anew."""
        self.used_s = time.monotonic()
        """When its last request ended, or it was loaded."""
        self.kept_s = keep_alive_s
        """How long it is kept after that."""
        self.max_model_len: int | None = None
        """Known once it was loaded."""
        self.switches = Counter[str]()
        self.switch_seconds = {"wake": 0.0, "load": 0.0}
        """How often it got an arena, and how long that took, by `wake` and `load`."""
        self.changed = asyncio.Event()
        """Set when something has happened that the switcher should look at; all models share one."""
        self._news = asyncio.Event()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def status(self) -> Status:
        if self.is_loading:
            return Status.LOADING
        if self.engine is None:
            return Status.FAILED if self.failure else Status.UNLOADED
        if self.engine.fault:
            return Status.FAILED
        return Status.RESTING if self.is_resting else Status.WARM

    @property
    def is_sound(self) -> bool:
        """Whether it is loaded and its engine works: one that hangs cannot be unloaded."""
        return self.engine is not None and self.engine.fault is None

    @property
    def is_warm(self) -> bool:
        return self.status is Status.WARM

    @property
    def running(self) -> int:
        """Answers that the engine has not ended yet, read or not: they want an arena."""
        return sum(not own.is_over for own in self._answers)

    @property
    def is_idle(self) -> bool:
        return not (self.at_gate or self.running)

    @property
    def inside(self) -> int:
        """Requests that use the engine, or are about to."""
        return self.users - self.at_gate

    def look(self) -> None:
        """Note who waits since when, tell those at the gate, and have the switcher look."""
        waits = not self.is_idle and not self.is_warm
        self.wanted_s = (self.wanted_s or time.monotonic()) if waits else None
        self.changed.set()
        self._news.set()
        self._news.clear()

    def check_loadable(self) -> None:
        """Refuse requests of a model that can never be loaded, or could not be just now."""
        if self.refusal or (self.failure and time.monotonic() < self._failed_s + RETRY_S):
            raise Failure(
                503,
                f"model: {self.name!r} could not be loaded: {self.refusal or self.failure}",
                param="model",
                code="model_not_loaded",
                headers={} if self.refusal else {"Retry-After": f"{RETRY_S:.0f}"},
            )

    async def ready(self) -> SpecEngine:
        """Wait until a request may enter; raise why it may not."""
        if self.engine is None or self.is_draining:
            self.check_loadable()
            self.at_gate += 1
            self.look()
            try:
                while self.engine is None or self.is_draining:
                    await self._news.wait()
                    if self.engine is None:
                        self.check_loadable()
            finally:
                self.at_gate -= 1
                self.look()
        return self.engine

    def enter(self, keep_alive_s: float | None = None) -> None:
        """Count a request, which may not be ready yet."""
        if keep_alive_s is not None and not self.may_unload:
            raise Failure(
                400,
                "keep_alive: models are unloaded on a CPU under Linux alone; leave it out.",
                param="keep_alive",
            )
        self.users += 1

    def leave(self, keep_alive_s: float | None) -> None:
        """Count a request off; it may say how long the model is kept for it."""
        self.users -= 1
        self.used_s = time.monotonic()
        self.kept_s = self.keep_alive_s if keep_alive_s is None else keep_alive_s
        self.look()

    @contextlib.contextmanager
    def answering(self, answer: Work) -> Iterator[None]:
        """Ask for an arena until an answer is over."""
        self._answers.add(answer)
        self.look()
        try:
            yield
        finally:
            self._answers.remove(answer)
            self.look()

    def seconds_kept(self, now_s: float) -> float | None:
        """Return how long the model is still to be kept; None: there is no end to it yet."""
        if not self.is_sound or self.users or self.kept_s < 0:
            return None
        return max(self.used_s + self.kept_s - now_s, 0.0)

    def load(self) -> None:
        """Build the engine, which has an arena from now on; any thread may. What is wrong is raised."""
        try:
            if self.refusal:
                raise self.refusal
            engine = SpecEngine(self.folder, self.config)
        except Exception as error:
            self.failure, self._failed_s = str(error) or repr(error), time.monotonic()
            raise
        self.failure, self.is_resting, self.is_draining = None, False, False
        self.max_model_len = engine.model.settings.max_model_len
        self.used_s = self.turn_s = time.monotonic()
        self.engine = engine

    async def load_meanwhile(self) -> None:
        """Build the engine beside the event loop; requests that wait for it are told what is wrong."""
        self.is_loading = True
        try:
            await asyncio.to_thread(self.load)
            settle_garbage()
        except SpecdecError as error:
            logger.error("%s cannot be loaded: %s", self.name, error)
        except Exception:
            logger.exception("%s cannot be loaded", self.name)
        finally:
            self.is_loading = False
            self.look()

    async def unload(self) -> None:
        """Close the engine and free its memory."""
        assert self.engine
        closing, self.engine, self.is_draining = [self.engine], None, False
        # Nothing but the call itself holds the engine: the thread lets go of what it was given too late.
        await asyncio.to_thread(lambda: closing.pop().close())
        settle_garbage()
        self.look()

    async def rest(self) -> None:
        """Have the engine give its arena back; requests that run are preempted."""
        assert self.engine
        await self._done(self.engine, self.engine.begin_rest)
        self.is_resting = True
        self.look()

    async def wake(self) -> None:
        """Give the engine an arena again."""
        assert self.engine
        await self._done(self.engine, self.engine.begin_wake)
        self.is_resting, self.turn_s = False, time.monotonic()
        self.look()

    async def _done(self, engine: SpecEngine, begin: Callable[[], "Future[None]"]) -> None:
        """Wait for what an engine does between two steps; one that has failed for good does nothing more."""
        try:
            doing = asyncio.wrap_future(begin())
            while not engine.fault and not doing.done():
                await asyncio.wait([doing], timeout=POLL_S)
            if doing.done():
                doing.result()
        except EngineError:
            pass  # it has failed or was closed, which its requests hear
        except Exception as error:
            engine.abandon(f"The engine could not hand its memory over: {error!r}.")


def settle_garbage() -> None:
    """Free what an unloaded model and the loading of one left, and set aside what was loaded.

    A garbage collection that scanned a loaded model would stall every request for 0.2 s.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    release_heap()
