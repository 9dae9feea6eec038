"""The caches that a trace is run over: none, a state for each block, and ours with its eviction policy."""

from dataclasses import dataclass

from specdec.bench.prefix.blocks import BlockCache, Run
from specdec.bench.prefix.traces import Turn
from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix.replay import Live, Replay
from specdec.state_slots.prefix.score import Work
from specdec.state_slots.prefix.tuner import Tuner


@dataclass(frozen=True, slots=True)
class Ground:
    """What all policies have in common: a model's memory, how much of it, and what reading costs."""

    layout: Layout
    num_bytes: int
    work: Work
    has_head: bool


@dataclass(frozen=True, slots=True)
class Uncached:
    hit: int = 0


class Nothing:
    """Cache nothing: every request has all the memory that it needs."""

    def admit(self, turn: Turn) -> Uncached:
        return Uncached()

    def read(self, admitted: Uncached, turn: Turn) -> None:
        """Forget it."""

    def end(self, admitted: Uncached, turn: Turn) -> None:
        """Forget it."""

    def held(self) -> tuple[int, int]:
        return 0, 0


class PerBlock:
    """Cache a state for each block."""

    def __init__(self, ground: Ground) -> None:
        self.cache = BlockCache(ground.layout, ground.num_bytes)

    def admit(self, turn: Turn) -> Run | None:
        return self.cache.admit(turn.prompt, len(turn.output))

    def read(self, admitted: Run, turn: Turn) -> None:
        self.cache.read(admitted, turn.prompt)

    def end(self, admitted: Run, turn: Turn) -> None:
        self.cache.end(admitted, turn.whole)

    def held(self) -> tuple[int, int]:
        states = self.cache.states * self.cache.state_bytes
        return self.cache.used_bytes - states, states


class Prefix:
    """Our prefix cache, with one `alpha` or with one that is tuned as requests end."""

    def __init__(self, ground: Ground, alpha: float | None) -> None:
        own = ground.layout, ground.num_bytes, ground.work
        self.replay = Replay(*own, alpha=alpha or 0.0, has_head=ground.has_head)
        self.tuner = Tuner(*own, has_head=ground.has_head) if alpha is None else None
        self.alphas: list[float] = [self.replay.score.alpha]
        """Those that were in use, one after the other."""

    def admit(self, turn: Turn) -> Live | None:
        return self.replay.admit(turn.prompt, len(turn.output))

    def read(self, admitted: Live, turn: Turn) -> None:
        self.replay.read(admitted, turn.prompt)

    def end(self, admitted: Live, turn: Turn) -> None:
        """Cache what a request has read, and tune alpha when it is due."""
        self.replay.end(admitted, turn.whole)
        if self.tuner is None:
            return
        self.tuner.observe(turn.prompt, turn.output)
        if self.tuner.is_due:
            alpha = self.replay.score.alpha = self.tuner.tune()
            if alpha != self.alphas[-1]:
                self.alphas.append(alpha)

    def held(self) -> tuple[int, int]:
        usage = self.replay.arena.usage()
        return usage.block_bytes + usage.kept_block_bytes, usage.state_bytes + usage.kept_state_bytes
