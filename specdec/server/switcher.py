"""Decides which models are loaded, and which of them have an arena: they take turns where not all have room.

The first to wait is served first. An idle model gives its arena up at once, another one after its turn, and
its requests go on when its next turn comes: nothing is lost, and none waits longer than the turns before it.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence

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
        self.changed = asyncio.Event()
        for own in self.residents:
            own.changed = self.changed

    def start(self) -> None:
        """Load, before any request comes, what fits; raise what is wrong where none can be loaded."""
        faults: list[Exception] = []
        for own in self.residents:
            if not (own.refusal or self._fits(own)):
                continue
            try:
                own.load()
            except Exception as error:
                faults.append(error)
                if len(self.residents) > 1:
                    logger.error("%s cannot be loaded: %s", own.name, error)
                continue
            if own.engine and sum(other.is_warm for other in self.residents) > self.arenas:
                own.engine.rest()
                own.is_resting = True
        if len(faults) == len(self.residents):
            raise faults[0]
        settle_garbage()

    def close(self, timeout_s: float | None = None) -> bool:
        """End all engines; tell if their threads have ended."""
        return all([own.engine.close(timeout_s) for own in self.residents if own.engine])

    @property
    def fault(self) -> str | None:
        """Why an engine has failed for good, if one has."""
        return next((own.engine.fault for own in self.residents if own.engine and own.engine.fault), None)

    async def run(self) -> None:
        """Hand memory over as requests come and end, for as long as the server runs."""
        while True:
            self.changed.clear()
            wait_s = await self._advance()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait_s)

    async def _advance(self) -> float | None:
        """Unload what is over, or serve who has waited longest; return after how long to look again.

        None: when something has changed.
        """
        now_s = time.monotonic()
        for each in self.residents:
            if each.is_sound and (each.seconds_kept(now_s) == 0 or (each.is_draining and not each.inside)):
                await self._unload(each)
        own = self._first()
        if own is None:
            kept_s = [each.seconds_kept(now_s) for each in self.residents]
            return min((left_s for left_s in kept_s if left_s is not None), default=None)
        start_s = time.monotonic()
        if own.engine is None and (before := await self._free_weights(own)):
            if before.is_warm or before.is_idle:
                return None
            own = before
        left_s = await self._free_arena()
        if left_s:
            return left_s if math.isfinite(left_s) else None
        kind = "wake" if own.engine else "load"
        await (own.wake() if own.engine else own.load_meanwhile())
        if own.is_warm:
            took_s = time.monotonic() - start_s
            own.switches[kind] += 1
            own.switch_seconds[kind] += took_s
            logger.info("%s has an arena after %.0f ms (%s)", own.name, took_s * 1e3, kind)
        return 0.0

    def _first(self) -> Resident | None:
        """Return the model that is to have an arena next: one that drains, or who has waited longest."""
        waiting = [
            own
            for own in self.residents
            if own.wanted_s is not None and not own.is_idle and not (own.engine and own.engine.fault)
        ]
        return min(waiting, key=lambda own: (not own.is_draining, own.wanted_s), default=None)

    async def _free_arena(self) -> float:
        """Let one rest where all arenas are taken; return how long that must wait, 0: one is free now."""
        warm = [own for own in self.residents if own.is_warm]
        if len(warm) < self.arenas:
            return 0.0
        idle = [own for own in warm if own.is_idle]
        if idle:
            await min(idle, key=lambda own: own.used_s).rest()
            return 0.0
        left_s, own = min(((self._turn_left(own), own) for own in warm), key=lambda pair: pair[0])
        if left_s:
            return left_s
        await own.rest()
        return 0.0

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
        return max(own.turn_s + self.switch_after_s - now_s, 0.0)

    async def _free_weights(self, own: Resident) -> Resident | None:
        """Unload idle models until this one's weights fit; return the one that has to drain first."""
        while not self._fits(own):
            others = [other for other in self.residents if other.is_sound and other is not own]
            idle = [other for other in others if not other.users]
            if not idle:
                before = next((other for other in others if other.is_draining), None)
                before = before or min(others, key=lambda other: other.turn_s, default=None)
                if before:
                    before.is_draining = True
                return before
            await self._unload(min(idle, key=lambda other: other.used_s))
        return None

    def _fits(self, own: Resident) -> bool:
        held = sum(other.weight_bytes for other in self.residents if other.engine and other is not own)
        return self.weights_bytes is None or held + own.weight_bytes <= self.weights_bytes

    async def _unload(self, own: Resident) -> None:
        await own.unload()
        logger.info("unloaded %s", own.name)
