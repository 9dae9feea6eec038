"""One model of the process: its engine while loaded, and the requests waiting for it."""

import asyncio
import contextlib
import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from enum import Enum, StrEnum, auto
from pathlib import Path

from specdec.config.engine import EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.errors import EngineError, SpecdecError
from specdec.server.failures import Failure, without_inside
from specdec.server.gate import Gate, GatedWork
from specdec.server.logs import naming_model
from specdec.server.threads import run_in_thread
from specdec.state_slots.pages import release_heap

logger = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds after which a request retries loading a model that failed to load."""
POLL_S = 0.25
"""Poll interval of an engine operation: a failed engine does not report."""
LET_GO_S = 1.0
"""Seconds to wait for a failed engine's thread to end; in a hanging step it does not."""


class Phase(Enum):
    """What the switcher has done with a model, or is doing: all but three phases end by themselves."""

    UNLOADED = auto()
    LOADING = auto()
    WARM = auto()
    """Loaded, with an arena."""
    YIELDING = auto()
    """Its running requests are preempted, then it releases its arena."""
    RESTING = auto()
    """Loaded, without an arena."""
    NEXT = auto()
    """It waits for another model to release its arena."""
    WAKING = auto()
    """It gets an arena."""
    FLUSHING = auto()
    """Its last step ends before its engine is closed, unless it fails meanwhile."""
    UNLOADING = auto()
    """Its engine is closed and freed."""
    DROPPING = auto()
    """Its failed engine is closed and freed."""
    STUCK = auto()
    """Its failed engine's thread still runs, so that its memory cannot be freed."""


MOVES: Mapping[Phase, Set[Phase]] = {
    Phase.UNLOADED: {Phase.LOADING},
    Phase.LOADING: {Phase.WARM, Phase.RESTING, Phase.UNLOADED},
    Phase.WARM: {Phase.YIELDING, Phase.FLUSHING, Phase.DROPPING},
    Phase.YIELDING: {Phase.RESTING, Phase.WARM},
    Phase.RESTING: {Phase.NEXT, Phase.WAKING, Phase.FLUSHING, Phase.DROPPING},
    Phase.NEXT: {Phase.WAKING, Phase.RESTING},
    Phase.WAKING: {Phase.WARM},
    Phase.FLUSHING: {Phase.UNLOADING, Phase.WARM, Phase.RESTING},
    Phase.UNLOADING: {Phase.UNLOADED},
    Phase.DROPPING: {Phase.STUCK, Phase.UNLOADED},
    Phase.STUCK: {Phase.DROPPING},
}
"""The phases that may follow each."""
LASTING = {Phase.UNLOADED, Phase.WARM, Phase.RESTING}
CLOSING = {Phase.FLUSHING, Phase.UNLOADING, Phase.DROPPING, Phase.STUCK}
"""The engine keeps the arena it may have until it is freed."""
WITH_ARENA = {Phase.WARM, Phase.YIELDING, Phase.WAKING}


class ModelStatus(StrEnum):
    """A model's phase as users see it."""

    WARM = "warm"
    """Loaded, with an arena."""
    RESTING = "resting"
    """Loaded, without an arena."""
    LOADING = "loading"
    UNLOADED = "unloaded"
    FAILED = "failed"
    """Loading failed, or its engine has failed for good."""


class Resident:
    """A model's state. Owned by the event loop's thread."""

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
        """Whether requests may set its keep-alive time."""
        self.engine: SpecEngine | None = None
        self.phase, self.holds_arena = Phase.UNLOADED, False
        self.is_draining = False
        """Whether new requests wait: it is unloaded once the current ones have ended."""
        self.blocked: str | None = None
        """Reason why it gets no memory until the process is restarted."""
        self.refusal: SpecdecError | None = None
        """Reason why this process can never load it."""
        self.failure: str | None = None
        """Reason of the last failed load; the error itself would keep the loaded data alive."""
        self._failed_s = 0.0
        self._fault: str | None = None
        """Reason of its last engine's failure, which was dropped since."""
        self._rest_failure: str | None = None
        """Reason for closing an engine that was otherwise intact: another one may be loaded."""
        self.gate = Gate(self.look)
        self.callers: Counter[str] = Counter()
        """Number of requests by caller."""
        self.wanted_s: float | None = None
        """Time since which a request waits for weights or an arena; None: none does."""
        self.turn_s = 0.0
        """Start of its turn, after preempted requests have been recomputed."""
        self.used_s = time.monotonic()
        """Time of its last finished answer, or of loading."""
        self._kept_until_s: dict[str, float] = {}
        """Keep-alive deadline per caller; an API key changes only its own."""
        self.max_model_len: int | None = None
        """Known after the first load."""
        self.switches = Counter[str]()
        self.switch_seconds = {"wake": 0.0, "load": 0.0}
        """Number and duration of loads, and of later wakes."""
        self.changed = asyncio.Event()
        """Set on changes for the switcher; shared by all models."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def status(self) -> ModelStatus:
        if self.phase is Phase.LOADING:
            return ModelStatus.LOADING
        if self.engine is None:
            return ModelStatus.FAILED if self.failure else ModelStatus.UNLOADED
        if self.phase is Phase.UNLOADING:
            return ModelStatus.UNLOADED
        if self.engine.fault:
            return ModelStatus.FAILED
        has_arena = self.holds_arena and self.phase is not Phase.WAKING
        return ModelStatus.WARM if has_arena else ModelStatus.RESTING

    @property
    def fault(self) -> str | None:
        """Reason of its engine's permanent failure, until another is loaded: the process counts as failed."""
        if self._rest_failure:
            return None
        return self.engine.fault if self.engine and self.phase is not Phase.UNLOADING else self._fault

    @property
    def is_sound(self) -> bool:
        """Whether it is loaded with a working engine."""
        return self.engine is not None and self.engine.fault is None

    @property
    def is_warm(self) -> bool:
        return self.status is ModelStatus.WARM

    @property
    def holds_weights(self) -> bool:
        """Whether its weights use memory; a failed engine's do until freed."""
        return self.phase is not Phase.UNLOADED

    @property
    def is_changing(self) -> bool:
        """Whether a task is changing its phase; the switcher skips it meanwhile."""
        return self.phase not in LASTING

    @property
    def may_load(self) -> bool:
        """Whether loading it may be tried now."""
        return not (self.refusal or (self.failure and time.monotonic() < self._failed_s + RETRY_S))

    @property
    def is_unused(self) -> bool:
        return not (self.gate.inside or self.gate.waiting)

    def move(self, phase: Phase) -> None:
        """Enter a phase, and count the arena that it holds there."""
        assert phase in MOVES[self.phase], f"{self.name}: {self.phase} -> {phase}"
        self.phase = phase
        if phase not in CLOSING:
            self.holds_arena = phase in WITH_ARENA

    def look(self) -> None:
        """Update the waiting time, and wake the switcher."""
        if self.gate.waiting or (self.gate.running and not self.is_warm):
            self.wanted_s = self.wanted_s or time.monotonic()
        elif self.is_warm or not self.gate.inside:  # otherwise requests at the gate keep their position
            self.wanted_s = None
        self.changed.set()

    def note_over(self) -> None:
        """Record that an answer is finished, though maybe unread."""
        self.used_s = time.monotonic()
        self.look()

    def check_loadable(self) -> None:
        """Raise if the model can never be loaded, or has just failed."""
        if not self.may_load:
            raise self._unloadable()

    def _unloadable(self) -> Failure:
        has_failed = self._fault or self._rest_failure
        return Failure(
            503,
            f"model: {self.name!r} {'is not' if has_failed else 'could not be'} loaded: "
            f"{self.refusal or self.failure or self._rest_failure}",
            param="model",
            code="engine_error" if has_failed else "model_not_loaded",
            headers={} if self.refusal else {"Retry-After": f"{RETRY_S:.0f}"},
        )

    def check_blocked(self) -> None:
        """Raise if requests would wait for memory that a failed engine holds."""
        if self.blocked:
            raise self._blocked()
        if self._rest_failure and self.engine:
            raise self._unloadable()

    def block(self, reason: str | None) -> None:
        """Set why it gets no memory; waiting requests end with this error."""
        if self.blocked == reason:
            return
        self.blocked = reason
        if reason:
            logger.error("%s", self._blocked())
            self.gate.end_all(self._blocked)

    def _blocked(self) -> Failure:
        return Failure(503, f"model: {self.name!r} {self.blocked}", param="model", code="engine_error")

    async def ready(self) -> SpecEngine:
        """Wait until a request may use the engine; raise if it may not."""
        self.check_blocked()
        if self.engine and not self.is_draining:
            return self.engine
        if self.engine is None:
            self.check_loadable()
        return await self.gate.wait()

    def enter(self, keep_alive_s: float | None = None, caller: str = "") -> None:
        """Count a caller's request, which may not be ready yet."""
        if keep_alive_s is not None and not self.may_unload:
            raise Failure(
                400,
                "keep_alive: models can be unloaded only on a CPU under Linux; leave it out.",
                param="keep_alive",
            )
        self.gate.users += 1
        self.callers[caller] += 1

    def leave(self, keep_alive_s: float | None, caller: str = "") -> None:
        """Remove a request; its caller may set how long the model is kept for it."""
        self.gate.users -= 1
        self.callers -= Counter({caller: 1})
        self.used_s = time.monotonic()
        self._kept_until_s[caller] = self._kept_until(keep_alive_s)
        self.look()

    def _kept_until(self, keep_alive_s: float | None) -> float:
        kept_s = self.keep_alive_s if keep_alive_s is None else keep_alive_s
        return math.inf if kept_s < 0 else self.used_s + kept_s

    @contextlib.contextmanager
    def answering(self, answer: GatedWork) -> Iterator[None]:
        """Count an answer as needing an arena until it is finished, within the context."""
        self.check_blocked()
        with self.gate.answering(answer):
            yield

    def seconds_kept(self, now_s: float) -> float | None:
        """Return the remaining keep-alive seconds; None: no limit yet."""
        until_s = max(self._kept_until_s.values(), default=self._kept_until(None))
        if not self.is_sound or not self.is_unused or math.isinf(until_s):
            return None
        return max(until_s - now_s, 0.0)

    def build(self) -> SpecEngine:
        """Build the engine with an arena; raises on failure. Thread-safe."""
        if self.refusal:
            raise self.refusal
        with naming_model(self.name, again=self.max_model_len is not None):
            return SpecEngine(self.folder, self.config)

    def note_failure(self, error: Exception | str) -> None:
        """Record a failed load; waiting requests get the error."""
        message = (str(error) or repr(error)).replace(str(self.folder), self.name)  # hide the path
        self.failure, self._failed_s = message, time.monotonic()
        self.gate.refuse(self._unloadable)

    def install(self, engine: SpecEngine, *, is_resting: bool = False) -> None:
        """Install a built engine, and admit requests."""
        self.failure = self._fault = None
        if not engine.fault:
            self._rest_failure = None
        self.is_draining = False
        self.max_model_len = engine.model.settings.max_model_len
        self.used_s = self.turn_s = time.monotonic()
        self._kept_until_s.clear()
        self.engine = engine
        self.move(Phase.RESTING if is_resting else Phase.WARM)
        self.gate.open(engine)

    async def load(self, has_room: Callable[[], bool]) -> None:
        """Build the engine in a thread; it rests at once if no arena is free."""
        try:
            engine = await run_in_thread(self.build, "load")
            await run_in_thread(collect_garbage, "load")
            is_resting = not has_room()
            if is_resting:
                await self._done(engine, engine.begin_rest)
            self.install(engine, is_resting=is_resting and engine.fault is None)
        except SpecdecError as error:
            logger.error("%s cannot be loaded: %s", self.name, error)
            self.note_failure(error)
        except Exception:
            logger.exception("%s cannot be loaded", self.name)
            self.note_failure("loading failed; see the server's log")
        finally:
            if self.phase is Phase.LOADING:
                self.move(Phase.UNLOADED)
            self.look()

    async def unload(self) -> bool:
        """Close the engine and free its memory; return whether done: one that fails meanwhile is kept."""
        assert self.engine
        # Wait for the end of its step: a hanging step is found by the watchdog, not closed here.
        await self._done(self.engine, self.engine.begin_flush)
        if self.engine.fault:
            self.move(Phase.WARM if self.holds_arena else Phase.RESTING)
        else:
            self.move(Phase.UNLOADING)
            while not await self._closed():
                pass
            await self._free()
        self.look()
        return self.engine is None

    def stay(self) -> None:
        """Admit requests again: the memory they were to free is no longer needed."""
        self.is_draining = False
        if self.engine and not self.engine.fault:
            self.gate.open(self.engine)

    async def let_go(self) -> None:
        """Free a failed engine's memory once its thread has ended."""
        assert self.engine
        self._fault, self.is_draining = self.fault, False
        while not await self._closed():
            if self.phase is Phase.DROPPING:
                self.move(Phase.STUCK)
            self.look()
            await asyncio.sleep(LET_GO_S)
        if self.phase is Phase.STUCK:
            self.move(Phase.DROPPING)
        self.note_failure(self._rest_failure or f"its engine has failed: {without_inside(self._fault or '')}")
        await self._free()
        self.look()

    async def _closed(self) -> bool:
        """Close the engine; return whether its thread has ended."""
        assert self.engine
        # The thread's frame may outlive the call and must not keep the engine alive.
        closing = [self.engine]
        try:
            return await run_in_thread(lambda: closing[0].close(LET_GO_S), "close")
        finally:
            closing.clear()

    async def _free(self) -> None:
        """Free a closed engine's memory, which counts as held until then."""
        self.engine = None
        await run_in_thread(collect_garbage, "free")
        self.is_draining = False
        self.move(Phase.UNLOADED)

    async def rest(self) -> None:
        """Release the arena; running requests are preempted."""
        assert self.engine
        await self._done(self.engine, self.engine.begin_rest)
        self.move(Phase.WARM if self.engine.fault else Phase.RESTING)
        self.look()

    async def wake(self) -> None:
        """Give the engine an arena again."""
        assert self.engine
        await self._done(self.engine, self.engine.begin_wake)
        self.move(Phase.WARM)
        self.turn_s = time.monotonic()
        self.look()

    async def _done(self, engine: SpecEngine, begin: Callable[[], "Future[None]"]) -> None:
        """Wait for an engine operation between two steps; returns early if the engine has failed."""
        try:
            future = asyncio.wrap_future(begin())
            while not engine.fault and not future.done():
                await asyncio.wait([future], timeout=POLL_S)
            if future.done():
                future.result()
        except EngineError:
            pass  # it failed or was closed, which its requests report
        except (OSError, MemoryError) as error:
            # The system refused memory. The arena is empty by then: closing the engine frees it.
            logger.exception("%s is closed: its memory could not be handed over", self.name)
            reason = error.strerror if isinstance(error, OSError) else None
            self._rest_failure = f"its memory could not be handed over ({reason or 'no memory is left'})"
            engine.abandon(f"The engine of {self.name!r} was closed, as {self._rest_failure}.")
        except Exception as error:
            engine.abandon(f"The engine could not hand its memory over: {error!r}.")


def collect_garbage() -> None:
    """Free memory left by unloading or loading a model; thread-safe."""
    gc.collect()
    release_heap()
