"""Decides which models are loaded, and which of them have an arena: they take turns where not all have room.

Callers take turns whose length is proportional to their weights, and of one caller's models the first to
wait is served first. An idle model gives its arena up at once, another one after its turn, and its requests
go on when its next turn comes: nothing is lost, and none waits longer than the turns before it.
Each change of a model is a task of its own, and what it will hold is counted from its beginning to its end.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from statistics import fmean

from specdec.server.resident import Resident, settle_garbage

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at a model that has yet to compute anew what its rest took back."""


class Switcher:
    """Owns the models of a process, and their shares of its memory."""

    def __init__(
        self,
        residents: Sequence[Resident],
        *,
        arenas: int = 1,
        weights_bytes: int | None = None,
        switch_after_s: float = 0.0,
    ) -> None:
        self.residents, self.arenas = tuple(residents), arenas
        self.weights_bytes, self.switch_after_s = weights_bytes, switch_after_s
        self._served_s: dict[str, float] = {}
        """By caller, when a model was last given an arena for it."""
        self._weight: Callable[[str], float] = lambda _: 1.0
        """Weight of a caller's share, which `run` is given."""
        self.changed = asyncio.Event()
        for own in self.residents:
            own.changed = self.changed

    def start(self) -> None:
        """Load, before any request comes, what fits; raise what is wrong where none can be loaded."""
        faults: list[Exception] = []
        for own in self.residents:
            if not (own.refusal or self._left_bytes(own) >= 0):
                continue
            try:
                engine = own.build()
            except Exception as error:
                own.note_failure(error)
                faults.append(error)
                if len(self.residents) > 1:
                    logger.error("%s cannot be loaded: %s", own.name, error)
                continue
            rests = not self._has_room()
            if rests:
                engine.rest()
            own.install(engine, is_resting=rests)
        if len(faults) == len(self.residents):
            raise faults[0]
        settle_garbage()

    def close(self, timeout_s: float | None = None) -> bool:
        """End all engines; tell if their threads have ended."""
        return all([own.engine.close(timeout_s) for own in self.residents if own.engine])

    @property
    def fault(self) -> str | None:
        """Why an engine has failed for good, if one has."""
        return next((own.fault for own in self.residents if own.fault), None)

    async def run(self, weight: Callable[[str], float]) -> None:
        """Hand memory over as requests come and end, until cancelled; `weight` returns a caller's."""
        self._weight = weight
        async with asyncio.TaskGroup() as changes:
            while True:
                self.changed.clear()
                wait_s = self._advance(changes)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.changed.wait()

    def _advance(self, changes: asyncio.TaskGroup) -> float | None:
        """Begin all that can be done now; return after how long to look again.

        None: when something has changed. What is begun goes on beside requests for all other models.
        """
        waits_s = [self._end(own, changes) for own in self.residents if not own.is_changing]
        for own in self.residents:
            own.block(self._why_blocked(own))
        self._load(changes)
        waits_s.append(self._hand_over(changes))
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _begin(self, own: Resident, change: Coroutine[None, None, None], changes: asyncio.TaskGroup) -> None:
        """Change a model beside everything else; nothing else is done to it meanwhile."""

        async def changing() -> None:
            try:
                await change
            finally:
                own.is_changing = False
                own.look()

        own.is_changing = True
        changes.create_task(changing())

    def _end(self, own: Resident, changes: asyncio.TaskGroup) -> float | None:
        """Drop an engine that has failed, unload what is no longer kept; return how long it is kept."""
        if own.engine and own.engine.fault:
            if not own.gate.inside:
                self._begin(own, own.let_go(), changes)
            return None
        kept_s = own.seconds_kept(time.monotonic())
        if own.engine and (kept_s == 0 or (own.is_draining and not own.gate.inside)):
            own.is_draining = True  # from now on: a request that comes before the task begins waits too
            self._begin(own, self._unload(own), changes)
            return None
        return kept_s

    def _load(self, changes: asyncio.TaskGroup) -> None:
        """Load what is asked for: the first to wait has the first call on the memory."""
        waiting = [
            own
            for own in self.residents
            if own.engine is None and own.gate.waiting and own.may_load and not own.is_changing
        ]
        if not waiting:  # what they drained for has been given up
            for own in self.residents:
                if own.is_draining and not own.is_changing:
                    own.stay()
        if not waiting or any(own.is_loading for own in self.residents):
            return  # one at a time: what its start-up measures touches an arena beyond the budget
        own = min(waiting, key=self._order)
        if self._left_bytes(own) < 0:
            self._free_weights(own, changes)
            return
        self._begin(own, self._loaded(own), changes)
        own.is_loading = True

    def _hand_over(self, changes: asyncio.TaskGroup) -> float | None:
        """Give arenas to those that wait, those that drain first; return how long the next has to wait."""
        waiting = [
            own
            for own in self.residents
            if own.is_sound and own.is_resting and own.gate.running and not own.is_changing
        ]
        for own in sorted(waiting, key=lambda own: (not own.is_draining, self._order(own))):
            if self._has_room():
                own.is_waking = True
                self._begin(own, self._woken(own), changes)
                continue
            warm = [other for other in self.residents if other.is_warm and not other.is_changing]
            idle = [other for other in warm if not other.gate.running]
            if idle:
                before, left_s = min(idle, key=lambda other: other.used_s), 0.0
            elif warm:
                left_s, before = min(
                    ((self._turn_left(other), other) for other in warm), key=lambda pair: pair[0]
                )
            else:
                return None
            if left_s:
                return left_s if math.isfinite(left_s) else None
            before.is_changing = True
            self._begin(own, self._woken(own, before), changes)
        return None

    def _order(self, own: Resident) -> tuple[float, float]:
        """Return when it is a waiting model's turn: callers take turns, however many models each asks for."""
        return min((self._served_s.get(name, 0.0) for name in own.callers), default=0.0), own.wanted_s or 0.0

    def _has_room(self) -> bool:
        """Return whether an arena is free."""
        return sum(own.holds_arena for own in self.residents) < self.arenas

    def _turn_left(self, own: Resident) -> float:
        """Return how long a model may go on though others wait.

        A turn begins when what was preempted at the end of the last one has been computed anew: else those
        that take longer than a turn to compute would never get on.
        """
        if own.is_draining:
            return math.inf
        now_s = time.monotonic()
        if own.engine and own.engine.is_catching_up:
            own.turn_s = now_s
            return LOOK_S
        return max(own.turn_s + self._turn_length(own) - now_s, 0.0)

    def _turn_length(self, own: Resident) -> float:
        """Return the seconds of a model's turn, in proportion to the largest weight of its callers.

        The turns of all models that compete last `switch_after_s` on average, whatever the weights are.
        """
        competing = [other for other in self.residents if other.gate.running or other is own]
        weights = [max(map(self._weight, other.callers), default=1.0) for other in competing]
        return self.switch_after_s * weights[competing.index(own)] / fmean(weights)

    def _left_bytes(self, own: Resident) -> float:
        """Return what would be left for weights with this model's beside those that are held."""
        if self.weights_bytes is None:
            return math.inf
        held = sum(other.weight_bytes for other in self.residents if other.holds_weights and other is not own)
        return self.weights_bytes - held - own.weight_bytes

    def _free_weights(self, own: Resident, changes: asyncio.TaskGroup) -> None:
        """Unload unused models until this one's weights fit; have others drain where that is too little."""
        others = [
            other for other in self.residents if other is not own and (other.is_sound or other.is_unloading)
        ]
        leaving = [other for other in others if other.is_draining]
        staying = [other for other in others if not (other.is_draining or other.is_changing)]
        left_bytes = self._left_bytes(own) + sum(other.weight_bytes for other in leaving)
        if left_bytes + sum(other.weight_bytes for other in staying) < 0:
            return  # it waits until what is being loaded can be unloaded again
        for other in sorted(staying, key=self._unload_order):
            if left_bytes >= 0:
                return
            left_bytes += other.weight_bytes
            if other.is_unused:
                self._begin(other, self._unload(other), changes)
            other.is_draining = True

    @staticmethod
    def _unload_order(own: Resident) -> tuple[bool, float]:
        """Order models by when they are unloaded for another: the unused ones first, then by their turns."""
        return not own.is_unused, own.used_s if own.is_unused else own.turn_s

    def _why_blocked(self, own: Resident) -> str | None:
        """Return why a model cannot have memory before the process is restarted, if it cannot."""
        stuck = [other for other in self.residents if other.is_stuck and other is not own]
        if not stuck or own.is_warm or own.is_changing:
            return None
        names = " and ".join(repr(other.name) for other in stuck)
        why = f"cannot run: its memory is held by {names}, whose engine has failed and does not stop; "
        if sum(other.holds_arena for other in stuck) >= self.arenas:
            return why + "restart the server, or let more models run at once (arenas)."
        held = sum(other.weight_bytes for other in stuck)
        if own.engine is None and held + own.weight_bytes > (self.weights_bytes or math.inf):
            return why + "restart the server, or raise weights_bytes."
        return None

    async def _loaded(self, own: Resident) -> None:
        start_s = time.monotonic()
        await own.load(self._has_room)
        if own.is_sound and own.engine:
            took_s, size = self._count(own, "load", start_s), own.engine.model.settings.weight_bytes
            logger.info("loaded %s in %.2f s: weights of %s bytes", own.name, took_s, f"{size:,}")

    async def _woken(self, own: Resident, before: Resident | None = None) -> None:
        """Give a model an arena: a free one, or that of another, which rests from now on."""
        start_s = time.monotonic()
        self._served_s |= dict.fromkeys(own.callers, start_s)
        if before:
            try:
                await before.rest()
            finally:
                before.is_changing = False
                before.look()
            if not (before.is_resting and own.is_sound):
                return  # it has failed, and keeps its arena
        await own.wake()
        if own.is_warm and own.engine:
            took_s, size = self._count(own, "wake", start_s), own.engine.model.settings.memory_bytes
            logger.info("woke %s in %.0f ms: an arena of %s bytes", own.name, took_s * 1e3, f"{size:,}")

    def _count(self, own: Resident, kind: str, start_s: float) -> float:
        took_s = time.monotonic() - start_s
        own.switches[kind] += 1
        own.switch_seconds[kind] += took_s
        return took_s

    async def _unload(self, own: Resident) -> None:
        if await own.unload():
            logger.info("unloaded %s", own.name)
