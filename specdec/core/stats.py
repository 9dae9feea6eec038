"""What drafts cost and earned, counted for one request or for a whole engine."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PHASES = ("draft", "verify", "commit", "rest", "whole")
"""Of a step; `whole` is the time of those that the device ran from end to end."""

SHORTEST = 1024
"""Contexts up to this length count as one; longer ones are told apart by doublings."""


@dataclass(slots=True)
class Sums:
    """Sums over verify steps: steps that began with the last certain token and chose what follows.

    The last step of a prefill samples a token too, but had nothing to verify; it is not counted.
    """

    steps: int = 0
    tokens: int = 0
    """What those steps added to the output, bonus tokens included."""
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Add one row of one step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens

    @property
    def acceptance_length(self) -> float:
        """Output tokens per verify step; 0 before the first."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Counts(Sums):
    """All that is counted of a request's verify steps, or of an engine's."""

    accepted_from_outputs: int = 0
    """Of what was accepted, what was found in the outputs of finished requests alone."""
    reached: list[int] = field(default_factory=list)
    """By depth, from 1: drafts that had a node there below what was accepted."""
    followed: list[int] = field(default_factory=list)
    """By depth: those of them in which the target chose such a node."""
    histogram: Counter[int] = field(default_factory=Counter)
    """Steps by the number of drafted tokens that they accepted."""
    contexts: dict[int, Sums] = field(default_factory=lambda: defaultdict(Sums))
    """By the longest context that counts here: 1024, 2048, 4096 …"""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Wall time of the steps by phase. Rows share steps, so requests' times overlap."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Steps, of prompts too, by how many tokens they kept: read, or written, of all rows together."""
    timed: int = 0
    """The steps that this is the time of; rows that shared one make it no more."""

    def note(
        self,
        *,
        drafted: int,
        depth: int,
        accepted: int,
        tokens: int,
        context: int,
        from_outputs: int = 0,
    ) -> None:
        """Count one row of one step: a draft of a number of nodes and a depth, and what came of it.

        It went on from a text of `context` tokens.
        """
        self.add(drafted, accepted, tokens)
        self.contexts[context_bound(context)].add(drafted, accepted, tokens)
        self.accepted_from_outputs += from_outputs
        self.histogram[accepted] += 1
        self.reached += [0] * (depth - len(self.reached))
        self.followed += [0] * (depth - len(self.followed))
        for i in range(min(depth, accepted + 1)):
            self.reached[i] += 1
            self.followed[i] += i < accepted

    def spend(self, seconds: Mapping[str, float]) -> None:
        """Add one step's time."""
        self.timed += 1
        for phase, took_s in seconds.items():
            self.seconds[phase] += took_s

    def by_context(self) -> dict[int, Sums]:
        """Copy what was counted by the length of contexts, shortest first; any thread may ask."""
        return {bound: replace(own) for bound, own in sorted(self.contexts.copy().items())}

    @property
    def per_depth(self) -> tuple[float, ...]:
        """The share accepted at each depth, of the drafts that reached it."""
        # Not strict: another thread may read between the growth of one and that of the other.
        return tuple(f / r if r else 0.0 for f, r in zip(self.followed, self.reached, strict=False))


def context_bound(length: int) -> int:
    """Return the longest context that counts beside one of this length."""
    return max(1 << (length - 1).bit_length(), SHORTEST)


class Clock:
    """Split a step's time by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Put the time since the last lap down to a phase."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._mark_s
        self._mark_s = now_s
