"""Simulate the requests of a trace over a cache, on a virtual clock."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from specdec.bench.prefix.traces import Turn


class Admitted(Protocol):
    """A request that was admitted and holds memory."""

    @property
    def hit(self) -> int:
        """Tokens of its prompt that were cache hits."""
        ...


A = TypeVar("A", bound=Admitted)


class Policy(Protocol[A]):
    """A cache and its eviction policy. Running requests and cached prefixes share one memory."""

    def admit(self, turn: Turn) -> A | None:
        """Begin a request; None: there is no memory for it now."""
        ...

    def read(self, admitted: A, turn: Turn) -> None:
        """Note that its prompt has been read."""
        ...

    def end(self, admitted: A, turn: Turn) -> None:
        """Cache what is worth it and free the rest."""
        ...

    def held(self) -> tuple[int, int]:
        """Return the bytes of keys and values, and of states, that are held now."""
        ...


@dataclass(frozen=True, slots=True)
class Speeds:
    """How long a request lives, which decides which run at the same time."""

    read: float = 10_000.0
    """Tokens of a prompt a second, of those that are not hit."""
    write: float = 50.0
    """Tokens of an answer a second."""
    most_alive: int = 16


@dataclass(slots=True)
class Course:
    """What came of a trace."""

    hits: list[int]
    """Of each turn, in the trace's order."""
    refused: int = 0
    """Turns for which there was no memory though nothing else was alive."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of keys and values, and of states, at the end of each request."""


def simulate(
    turns: Sequence[Turn], policy: Policy[A], speeds: Speeds, on_turn: Callable[[], object] = lambda: None
) -> Course:
    """Run a trace. Turns wait for the session's last one to end, for memory, and for a place, in order."""
    return _Run(turns, policy, speeds, on_turn).run()


class _Run(Generic[A]):
    def __init__(
        self, turns: Sequence[Turn], policy: Policy[A], speeds: Speeds, on_turn: Callable[[], object]
    ) -> None:
        self.turns, self.policy, self.speeds, self.on_turn = turns, policy, speeds, on_turn
        self.course = Course([0] * len(turns))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        """Time, sequence number, action: events of one time keep the order in which they were planned."""
        self._planned = 0
        self._now = 0.0
        self._waiting: deque[int] = deque()
        self._alive = 0
        self._of_session: dict[str, deque[int]] = {}
        """The turns of each session that are over it: the first is under way, the others wait for it."""

    def run(self) -> Course:
        for number, turn in enumerate(self.turns):
            self._plan(turn.ts, lambda number=number: self._arrive(number))  # type: ignore[misc]
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.course

    def _plan(self, at_s: float, act: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at_s, self._planned, act))

    def _arrive(self, number: int) -> None:
        own = self._of_session.setdefault(self.turns[number].session, deque())
        own.append(number)
        if len(own) == 1:
            self._wait(number)

    def _wait(self, number: int) -> None:
        self._waiting.append(number)
        self._admit()

    def _admit(self) -> None:
        """Begin what waits, from the first on, as long as there is room."""
        while self._waiting and self._alive < self.speeds.most_alive:
            number = self._waiting[0]
            live = self.policy.admit(self.turns[number])
            if live is None and self._alive:
                return
            self._waiting.popleft()
            if live is None:
                self.course.refused += 1
                self._leave(number)
                continue
            self._alive += 1
            self._begin(number, live)

    def _begin(self, number: int, live: A) -> None:
        turn = self.turns[number]
        self.course.hits[number] = live.hit
        read_s = self._now + (len(turn.prompt) - live.hit) / self.speeds.read
        self._plan(read_s, lambda: self.policy.read(live, turn))
        self._plan(read_s + len(turn.output) / self.speeds.write, lambda: self._end(number, live))

    def _end(self, number: int, live: A) -> None:
        self.policy.end(live, self.turns[number])
        self._alive -= 1
        self.course.held.append(self.policy.held())
        self._leave(number)
        self._admit()

    def _leave(self, number: int) -> None:
        """Start the session's next turn, if it was waiting for this one."""
        self.on_turn()
        own = self._of_session[self.turns[number].session]
        own.popleft()
        if own:
            self._plan(self._now, lambda: self._wait(own[0]))
