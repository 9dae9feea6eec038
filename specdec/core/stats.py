"""Counts of verify steps and drafts, for a request or an engine."""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PHASES = ("draft", "verify", "commit", "rest", "whole")
"""Phases of a step; `whole` is the time of steps that ran entirely on the device."""

SHORTEST = 1024
"""Longest context in the first bucket; each further bucket doubles it."""


@dataclass(slots=True)
class StepSums:
    """Sums over verify steps, which start with the last committed token.

    The last step of a prefill samples a token too, but verifies nothing; it is not counted.
    """

    steps: int = 0
    tokens: int = 0
    """Tokens those steps added to the output, bonus tokens included."""
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Add one row of a step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.tokens += tokens

    @property
    def acceptance_length(self) -> float:
        """Output tokens per verify step; 0 before the first."""
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class SpeculationCounts(StepSums):
    """All counts of a request's or an engine's verify steps."""

    accepted_from_outputs: int = 0
    """Accepted tokens that only finished requests' outputs had proposed."""
    reached: list[int] = field(default_factory=list)
    """By depth, from 1: drafts with a node there below an accepted parent."""
    followed: list[int] = field(default_factory=list)
    """By depth: drafts among these in which the target chose such a node."""
    histogram: Counter[int] = field(default_factory=Counter)
    """Steps by their number of accepted draft tokens."""
    contexts: dict[int, StepSums] = field(default_factory=lambda: defaultdict(StepSums))
    """By the bucket's longest context: 1024, 2048, 4096 …"""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Wall time of the steps by phase. Rows share steps, so requests' times overlap."""
    sizes: Counter[int] = field(default_factory=Counter)
    """Steps, prefill included, by the total number of tokens committed over all rows."""
    timed: int = 0
    """Number of timed steps; rows that share one count it once."""

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
        """Count one row of a step: its draft's size and depth, and the outcome.

        `context` is the length of the text before the step.
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

    def by_context(self) -> dict[int, StepSums]:
        """Return a copy of the sums by context, shortest first; callable from any thread."""
        return {bound: replace(sums) for bound, sums in sorted(self.contexts.copy().items())}

    @property
    def per_depth(self) -> tuple[float, ...]:
        """Fraction accepted at each depth, of the drafts that reached it."""
        # Not strict: another thread may read while only one of the lists has grown.
        return tuple(f / r if r else 0.0 for f, r in zip(self.followed, self.reached, strict=False))


def context_bound(length: int) -> int:
    """Return the bucket of a context of this length."""
    return max(1 << (length - 1).bit_length(), SHORTEST)


class PhaseTimer:
    """Splits a step's time by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark_s = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now_s = time.perf_counter()
        self.seconds[phase] += now_s - self._mark_s
        self._mark_s = now_s
