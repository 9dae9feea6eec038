"""The caches that a trace is run over: none, a state a block, and ours with an order of giving way."""

from dataclasses import dataclass

from specdec.bench.prefix.blocks import BlockCache, Run
from specdec.bench.prefix.traces import Turn
from specdec.state_slots.layout import Layout
from specdec.state_slots.prefix import replay
from specdec.state_slots.prefix.replay import Replay
from specdec.state_slots.prefix.score import Work
from specdec.state_slots.prefix.tuner import Tuner


@dataclass(frozen=True, slots=True)
class Ground:
    """What all policies have in common: a model's memory, how much of it, and what reading costs."""

    layout: Layout
    num_bytes: int
    work: Work
    has_head: bool


class Nothing:
    """Keep nothing: every request has all the memory that it needs."""

    @dataclass(slots=True)
    class Live:
        hit: int = 0

        def read(self) -> None:
            """Forget it."""

        def end(self) -> None:
            """Forget it."""

    def admit(self, turn: Turn) -> "Nothing.Live":
        return Nothing.Live()

    def held(self) -> tuple[int, int]:
        return 0, 0


class PerBlock:
    """Keep a state for each block."""

    def __init__(self, ground: Ground) -> None:
        self.cache = BlockCache(ground.layout, ground.num_bytes)

    def admit(self, turn: Turn) -> "BlockRun | None":
        run = self.cache.admit(turn.prompt, len(turn.output))
        return None if run is None else BlockRun(self.cache, run, turn)

    def held(self) -> tuple[int, int]:
        states = self.cache.states * self.cache.state_bytes
        return self.cache.used_bytes - states, states


@dataclass(slots=True)
class BlockRun:
    cache: BlockCache
    run: Run
    turn: Turn

    @property
    def hit(self) -> int:
        return self.run.hit

    def read(self) -> None:
        self.cache.read(self.run, self.turn.prompt)

    def end(self) -> None:
        self.cache.end(self.run, self.turn.whole)


class Prefix:
    """Our cache, with one `alpha` or with one that is tuned as requests end."""

    def __init__(self, ground: Ground, alpha: float | None) -> None:
        own = ground.layout, ground.num_bytes, ground.work
        self.replay = Replay(*own, alpha=alpha or 0.0, has_head=ground.has_head)
        self.tuner = Tuner(*own, has_head=ground.has_head) if alpha is None else None
        self.alphas: list[float] = [self.replay.score.alpha]
        """Those that were in use, one after the other."""

    def admit(self, turn: Turn) -> "PrefixRun | None":
        live = self.replay.admit(turn.prompt, len(turn.output))
        return None if live is None else PrefixRun(self, live, turn)

    def held(self) -> tuple[int, int]:
        usage = self.replay.arena.usage()
        return usage.block_bytes + usage.kept_block_bytes, usage.state_bytes + usage.kept_state_bytes

    def over(self, turn: Turn) -> None:
        """Learn from a request that has ended."""
        if self.tuner is None:
            return
        self.tuner.observe(turn.prompt, turn.output)
        if self.tuner.is_due:
            alpha = self.replay.score.alpha = self.tuner.tune()
            if alpha != self.alphas[-1]:
                self.alphas.append(alpha)


@dataclass(slots=True)
class PrefixRun:
    policy: Prefix
    live: replay.Live
    turn: Turn

    @property
    def hit(self) -> int:
        return self.live.hit

    def read(self) -> None:
        self.policy.replay.read(self.live, self.turn.prompt)

    def end(self) -> None:
        self.policy.replay.end(self.live, self.turn.whole)
        self.policy.over(self.turn)
