"""The requests of one model: those that wait until they may enter, and the answers that its engine is at."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from specdec.engine.engine import SpecEngine
from specdec.server.failures import Failure


class Work(Protocol):
    """Something that an engine was asked for."""

    @property
    def is_over(self) -> bool: ...

    def fail(self, failure: Failure) -> None:
        """End it with an error, unless it is over."""
        ...


class Gate:
    """Owned by the event loop's thread; `on_change` is called when a request begins or ends to wait."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.users = 0
        """Requests under way."""
        self._waiting: list[asyncio.Future[SpecEngine]] = []
        """Of these, those that wait until the model is loaded."""
        self._answers: set[Work] = set()
        """What the engine was asked for; what is over is perhaps still being read."""

    @property
    def waiting(self) -> int:
        """Requests that wait until the model is loaded."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers that the engine has not ended yet: they want an arena."""
        return sum(not own.is_over for own in self._answers)

    @property
    def inside(self) -> int:
        """Requests that use the engine, or are about to; one whose answer is only being read does not."""
        return self.users - self.waiting - sum(own.is_over for own in self._answers)

    async def wait(self) -> SpecEngine:
        """Wait until the gate is opened; raise why it is not."""
        entry: asyncio.Future[SpecEngine] = asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        self._on_change()
        try:
            return await entry
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            self._on_change()

    def open(self, engine: SpecEngine) -> None:
        """Admit all that wait; they count as inside at once."""
        for entry in self._taken():
            entry.set_result(engine)

    def refuse(self, failure: Callable[[], Failure]) -> None:
        """Send away all that wait, each with an error of its own."""
        for entry in self._taken():
            entry.set_exception(failure())

    def _taken(self) -> "list[asyncio.Future[SpecEngine]]":
        entries, self._waiting = self._waiting, []
        return [entry for entry in entries if not entry.done()]

    def end_all(self, failure: Callable[[], Failure]) -> None:
        """Refuse what waits, and fail what the engine has not ended."""
        self.refuse(failure)
        for answer in list(self._answers):
            answer.fail(failure())

    @contextlib.contextmanager
    def answering(self, answer: Work) -> Iterator[None]:
        """Ask for an arena until an answer is over, in here or sooner."""
        self._answers.add(answer)
        self._on_change()
        try:
            yield
        finally:
            self._answers.remove(answer)
            self._on_change()
