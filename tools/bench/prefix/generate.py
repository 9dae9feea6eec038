"""Random traces: chats, agents, and questions with shared prompts, sized like published ones.

Their assumptions and sources are listed in docs/prefix-cache.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from specdec.state_slots.prefix.tree import NO_IDS, Ids

SECONDS_A_TOKEN = 0.5
"""Typing speed: 90 words a minute, three quarters of a word per token."""
LONGEST = 32768
"""Maximum tokens of a request with its answer."""
FEWEST_SHARES = 4
"""Minimum number of shared prefixes in a short trace, if the full trace has as many."""


@dataclass(frozen=True, slots=True, eq=False)
class TraceTurn:
    """One request: the whole prompt, including earlier turns, and its answer."""

    session: str
    turn: int
    ts: float
    """Seconds after the trace's start, and not before the session's previous turn has ended."""
    prompt: Ids
    output: Ids


@dataclass(frozen=True, slots=True)
class Trace:
    """Turns ordered by time."""

    name: str
    turns: Sequence[TraceTurn]


@dataclass(frozen=True, slots=True)
class LognormalLength:
    """A lognormal length in tokens."""

    median: float
    sigma: float
    most: int = 8192

    def draw(self, rng: np.random.Generator) -> int:
        return int(np.clip(rng.lognormal(math.log(self.median), self.sigma), 1, self.most))


@dataclass(frozen=True, slots=True)
class SessionKind:
    """The parameters of one kind of session."""

    sessions: int
    """Sessions in a full trace of two to three thousand requests."""
    per_second: float
    """Mean rate at which sessions start."""
    asked: LognormalLength
    answered: LognormalLength
    turns: Callable[[np.random.Generator], int]
    shared: LognormalLength | None = None
    """A prefix common to sessions; of `shares` different ones, the n-th has weight 1/n."""
    shares: int = 1
    first: LognormalLength | None = None
    """Additional tokens of the first turn, such as an issue to solve."""
    pause_s: float | None = None
    """Mean pause between an answer and the next turn, Poisson distributed; None: the time to type it."""

    def scaled(self, scale: float) -> "SessionKind":
        """Scale all lengths."""

        def part(length: LognormalLength) -> LognormalLength:
            return replace(length, median=length.median * scale, most=max(int(length.most * scale), 1))

        return replace(
            self,
            asked=part(self.asked),
            answered=part(self.answered),
            shared=part(self.shared) if self.shared else None,
            first=part(self.first) if self.first else None,
        )


def _at_least_ten(more: float) -> Callable[[np.random.Generator], int]:
    return lambda rng: 9 + int(rng.geometric(1 / (more + 1)))


KINDS: Mapping[str, SessionKind] = MappingProxyType(
    {
        "lmsys": SessionKind(
            200, 1.0, LognormalLength(35, 1.1), LognormalLength(150, 0.9, 2048), _at_least_ten(4)
        ),
        "sharegpt": SessionKind(
            150, 1.0, LognormalLength(70, 1.3), LognormalLength(220, 0.95, 2048), _at_least_ten(8)
        ),
        "agents": SessionKind(
            sessions=110,
            per_second=0.5,
            asked=LognormalLength(350, 1.2),
            answered=LognormalLength(130, 0.7, 2048),
            turns=lambda rng: int(np.clip(rng.lognormal(math.log(20), 0.5), 3, 50)),
            shared=LognormalLength(1800, 0.0),
            first=LognormalLength(500, 0.8),
            pause_s=5.0,
        ),
        "system-prompts": SessionKind(
            sessions=3000,
            per_second=4.0,
            asked=LognormalLength(60, 0.8),
            answered=LognormalLength(120, 0.7, 1024),
            turns=lambda _: 1,
            shared=LognormalLength(1500, 0.6),
            shares=40,
        ),
    }
)


def generate(
    name: str, seed: int, *, sessions: int, vocab: int, scale: float = 1.0, most: int = LONGEST
) -> Trace:
    """Generate a trace; no request, including its answer, exceeds `most` tokens.

    Fewer sessions share fewer prefixes, so that each prefix is as common as in the full trace.
    """
    kind = KINDS[name].scaled(scale)
    shares = max(kind.shares * sessions // kind.sessions, min(kind.shares, FEWEST_SHARES))
    rng = np.random.default_rng([seed, sorted(KINDS).index(name)])
    shared = [_tokens(rng, kind.shared.draw(rng), vocab) for _ in range(shares)] if kind.shared else [NO_IDS]
    weights = np.array([1 / n for n in range(1, len(shared) + 1)])
    turns: list[TraceTurn] = []
    at_s = 0.0
    for number in range(sessions):
        begun = shared[rng.choice(len(shared), p=weights / weights.sum())]
        turns += _session(kind, rng, str(number), at_s, begun, vocab, most)
        at_s += rng.exponential(1 / kind.per_second)
    return Trace(name, sorted(turns, key=lambda turn: (turn.ts, turn.session, turn.turn)))


def _session(
    kind: SessionKind, rng: np.random.Generator, name: str, at_s: float, begun: Ids, vocab: int, most: int
) -> Iterator[TraceTurn]:
    """Yield a session's turns until it is complete, or the next would not fit."""
    first = _tokens(rng, kind.first.draw(rng), vocab) if kind.first else NO_IDS
    parts = [np.concatenate([begun, first])]
    for turn in range(kind.turns(rng)):
        asked = _tokens(rng, kind.asked.draw(rng), vocab)
        output = _tokens(rng, kind.answered.draw(rng), vocab)
        if turn:
            at_s += len(asked) * SECONDS_A_TOKEN if kind.pause_s is None else float(rng.poisson(kind.pause_s))
        prompt = np.concatenate([*parts, asked])
        if len(prompt) + len(output) > most:
            return
        yield TraceTurn(name, turn, at_s, prompt, output)
        parts += [asked, output]


def _tokens(rng: np.random.Generator, count: int, vocab: int) -> Ids:
    return rng.integers(0, vocab, count, np.int32)
