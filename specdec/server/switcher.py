"""Decides which models are loaded and which have an arena; they take turns if memory is short.

Callers take turns in proportion to their weights; of one caller's models the longest waiting is served first.
An idle model gives up its arena at once, a busy one after its turn, and its requests continue in its next
turn: nothing is lost, and waiting is bounded by the turns before it. Each change of a model is a separate
task, whose final memory is counted from its start to its end.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from specdec.server.resident import Phase, Resident, collect_garbage

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Poll interval of a model that recomputes preempted requests."""


class Switcher:
    """Owns the models of a process and their memory shares."""

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
        """Time at which a model last got an arena for each caller."""
        self._weight: Callable[[str], float] = lambda _: 1.0
        """Weight of a caller's share; set by `run`."""
        self.changed = asyncio.Event()
        for resident in self.residents:
            resident.changed = self.changed

    def start(self) -> None:
        """Load the models that fit, before serving; raise if none can be loaded."""
        faults: list[Exception] = []
        for resident in self.residents:
            if not (resident.refusal or self._left_bytes(resident) >= 0):
                continue
            resident.move(Phase.LOADING)
            try:
                engine = resident.build()
            except Exception as error:
                resident.move(Phase.UNLOADED)
                resident.note_failure(error)
                faults.append(error)
                if len(self.residents) > 1:
                    logger.error("%s cannot be loaded: %s", resident.name, error)
                continue
            is_resting = not self._has_room()
            if is_resting:
                engine.rest()
            resident.install(engine, is_resting=is_resting)
        if len(faults) == len(self.residents):
            raise faults[0]
        collect_garbage()

    def close(self, timeout_s: float | None = None) -> bool:
        """Close all engines; return whether their threads have ended."""
        return all([resident.engine.close(timeout_s) for resident in self.residents if resident.engine])

    @property
    def fault(self) -> str | None:
        """Reason of a permanent engine failure, if any."""
        return next((resident.fault for resident in self.residents if resident.fault), None)

    async def run(self, weight: Callable[[str], float]) -> None:
        """Reassign memory as requests arrive and end, until cancelled; `weight` returns a caller's weight."""
        self._weight = weight
        async with asyncio.TaskGroup() as changes:
            while True:
                self.changed.clear()
                wait_s = self._advance(changes)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self.changed.wait()

    def _advance(self, changes: asyncio.TaskGroup) -> float | None:
        """Start all possible changes; return the seconds until the next check.

        None: wait for a change. Requests for other models continue meanwhile.
        """
        waits_s = [self._end(resident, changes) for resident in self.residents if not resident.is_changing]
        for resident in self.residents:
            resident.block(self._why_blocked(resident))
        self._load(changes)
        waits_s.append(self._hand_over(changes))
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _end(self, resident: Resident, changes: asyncio.TaskGroup) -> float | None:
        """Drop a failed engine, or unload an expired model; return its remaining keep-alive seconds."""
        if resident.engine and resident.engine.fault:
            if not resident.gate.inside:
                resident.move(Phase.DROPPING)
                changes.create_task(resident.let_go())
            return None
        kept_s = resident.seconds_kept(time.monotonic())
        if resident.engine and (kept_s == 0 or (resident.is_draining and not resident.gate.inside)):
            self._unload(resident, changes)
            return None
        return kept_s

    def _load(self, changes: asyncio.TaskGroup) -> None:
        """Load a requested model; the longest waiting gets memory first."""
        waiting = [
            resident
            for resident in self.residents
            if resident.engine is None
            and resident.gate.waiting
            and resident.may_load
            and not resident.is_changing
        ]
        if not waiting:  # the model they drained for was given up
            for resident in self.residents:
                if resident.is_draining and not resident.is_changing:
                    resident.stay()
        if not waiting or any(resident.phase is Phase.LOADING for resident in self.residents):
            return  # one at a time: start-up measurements use an arena beyond the budget
        resident = min(waiting, key=self._order)
        if self._left_bytes(resident) < 0:
            self._free_weights(resident, changes)
            return
        resident.move(Phase.LOADING)
        changes.create_task(self._loaded(resident))

    def _hand_over(self, changes: asyncio.TaskGroup) -> float | None:
        """Assign arenas to waiting models, draining ones first; return how long the next one waits."""
        waiting = [
            resident
            for resident in self.residents
            if resident.is_sound and resident.phase is Phase.RESTING and resident.gate.running
        ]
        for resident in sorted(
            waiting, key=lambda resident: (not resident.is_draining, self._order(resident))
        ):
            if self._has_room():
                resident.move(Phase.WAKING)
                changes.create_task(self._wake(resident))
                continue
            warm = [other for other in self.residents if other.is_warm and not other.is_changing]
            idle = [other for other in warm if not other.gate.running]
            if idle:
                previous, left_s = min(idle, key=lambda other: other.used_s), 0.0
            elif warm:
                left_s, previous = min(
                    ((self._turn_left(other), other) for other in warm), key=lambda pair: pair[0]
                )
            else:
                return None
            if left_s:
                return left_s if math.isfinite(left_s) else None
            previous.move(Phase.YIELDING)
            resident.move(Phase.NEXT)
            changes.create_task(self._wake(resident, previous))
        return None

    def _order(self, resident: Resident) -> tuple[float, float]:
        """Return a waiting model's sort key: callers take turns, however many models each uses."""
        return min(
            (self._served_s.get(name, 0.0) for name in resident.callers), default=0.0
        ), resident.wanted_s or 0.0

    def _has_room(self) -> bool:
        """Return whether an arena is free."""
        return sum(resident.holds_arena for resident in self.residents) < self.arenas

    def _turn_left(self, resident: Resident) -> float:
        """Return the remaining seconds of a model's turn while others wait.

        A turn starts when requests preempted at the end of the last one have been recomputed; otherwise
        requests whose recomputation exceeds a turn would never progress.
        """
        if resident.is_draining:
            return math.inf
        now_s = time.monotonic()
        if resident.engine and resident.engine.is_catching_up:
            resident.turn_s = now_s
            return LOOK_S
        return max(resident.turn_s + self._turn_length(resident) - now_s, 0.0)

    def _turn_length(self, resident: Resident) -> float:
        """Return the length of a model's turn, in proportion to the largest weight of its callers.

        The turns of all competing models average `switch_after_s`, whatever the weights.
        """
        competing = [other for other in self.residents if other.gate.running or other is resident]
        weights = [max(map(self._weight, other.callers), default=1.0) for other in competing]
        return self.switch_after_s * weights[competing.index(resident)] / fmean(weights)

    def _left_bytes(self, resident: Resident) -> float:
        """Return the bytes left for weights after loading this model."""
        if self.weights_bytes is None:
            return math.inf
        held_bytes = sum(
            other.weight_bytes for other in self.residents if other.holds_weights and other is not resident
        )
        return self.weights_bytes - held_bytes - resident.weight_bytes

    def _free_weights(self, resident: Resident, changes: asyncio.TaskGroup) -> None:
        """Unload unused models until this one's weights fit; drain others if that is not enough."""
        others = [
            other
            for other in self.residents
            if other is not resident and (other.is_sound or other.phase is Phase.UNLOADING)
        ]
        leaving = [other for other in others if other.is_draining]
        staying = [other for other in others if not (other.is_draining or other.is_changing)]
        left_bytes = self._left_bytes(resident) + sum(other.weight_bytes for other in leaving)
        if left_bytes + sum(other.weight_bytes for other in staying) < 0:
            return  # wait until a model being loaded can be unloaded again
        for other in sorted(staying, key=self._unload_order):
            if left_bytes >= 0:
                return
            left_bytes += other.weight_bytes
            if other.is_unused:
                self._unload(other, changes)
            other.is_draining = True

    @staticmethod
    def _unload_order(resident: Resident) -> tuple[bool, float]:
        """Return the unload order: unused models first, then by start of turn."""
        return not resident.is_unused, resident.used_s if resident.is_unused else resident.turn_s

    def _why_blocked(self, resident: Resident) -> str | None:
        """Return why a model gets no memory until the process is restarted, or None."""
        stuck = [other for other in self.residents if other.phase is Phase.STUCK and other is not resident]
        if not stuck or resident.is_warm or resident.is_changing:
            return None
        names = " and ".join(repr(other.name) for other in stuck)
        message = f"cannot run: its memory is held by {names}, whose engine has failed and does not stop; "
        if sum(other.holds_arena for other in stuck) >= self.arenas:
            return message + "restart the server, or let more models run at once (arenas)."
        held_bytes = sum(other.weight_bytes for other in stuck)
        if resident.engine is None and held_bytes + resident.weight_bytes > (self.weights_bytes or math.inf):
            return message + "restart the server, or raise weights_bytes."
        return None

    async def _loaded(self, resident: Resident) -> None:
        start_s = time.monotonic()
        await resident.load(self._has_room)
        if resident.is_sound and resident.engine:
            took_s, size = self._count(resident, "load", start_s), resident.engine.model.settings.weight_bytes
            logger.info("loaded %s in %.2f s: weights of %s bytes", resident.name, took_s, f"{size:,}")

    async def _wake(self, resident: Resident, previous: Resident | None = None) -> None:
        """Give a model a free arena, or that of another, which then rests."""
        start_s = time.monotonic()
        self._served_s |= dict.fromkeys(resident.callers, start_s)
        if previous:
            await previous.rest()
            if not (previous.phase is Phase.RESTING and resident.is_sound):
                resident.move(Phase.RESTING)  # the other one failed and keeps its arena
                resident.look()
                return
            resident.move(Phase.WAKING)
        await resident.wake()
        if resident.is_warm and resident.engine:
            took_s, size = self._count(resident, "wake", start_s), resident.engine.model.settings.memory_bytes
            logger.info("woke %s in %.0f ms: an arena of %s bytes", resident.name, took_s * 1e3, f"{size:,}")

    def _count(self, resident: Resident, kind: str, start_s: float) -> float:
        took_s = time.monotonic() - start_s
        resident.switches[kind] += 1
        resident.switch_seconds[kind] += took_s
        return took_s

    def _unload(self, resident: Resident, changes: asyncio.TaskGroup) -> None:
        async def unload() -> None:
            if await resident.unload():
                logger.info("unloaded %s", resident.name)

        # Set now, so that requests arriving before the task starts also wait.
        resident.is_draining = True
        resident.move(Phase.FLUSHING)
        changes.create_task(unload())
