"""The requests of one model: those waiting for it to load, and its running answers."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from specdec.engine.engine import SpecEngine
from specdec.server.failures import Failure


class GatedWork(Protocol):
    """Work submitted to an engine."""

    @property
    def is_over(self) -> bool: ...

    def fail(self, failure: Failure) -> None:
        """End it with an error, unless it is finished."""
        ...


class Gate:
    """Requests of one model. Owned by the event loop's thread; `on_change` reports changes in waiting."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.users = 0
        """Number of requests in progress."""
        self._waiting: list[asyncio.Future[SpecEngine]] = []
        """Requests that wait for the model to load."""
        self._answers: set[GatedWork] = set()
        """Work submitted to the engine; finished work may still be being read."""

    @property
    def waiting(self) -> int:
        """Number of requests waiting for the model to load."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of answers the engine has not finished, which need an arena."""
        return sum(not answer.is_over for answer in self._answers)

    @property
    def inside(self) -> int:
        """Number of requests that use the engine or are about to, without those only being read."""
        return self.users - self.waiting - sum(answer.is_over for answer in self._answers)

    async def wait(self) -> SpecEngine:
        """Wait until the gate opens; raise if it is refused."""
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
        """Admit all waiting requests, which count as inside at once."""
        for entry in self._taken():
            entry.set_result(engine)

    def refuse(self, failure: Callable[[], Failure]) -> None:
        """Refuse all waiting requests, each with its own error."""
        for entry in self._taken():
            entry.set_exception(failure())

    def _taken(self) -> "list[asyncio.Future[SpecEngine]]":
        entries, self._waiting = self._waiting, []
        return [entry for entry in entries if not entry.done()]

    def end_all(self, failure: Callable[[], Failure]) -> None:
        """Refuse waiting requests, and fail unfinished answers."""
        self.refuse(failure)
        for answer in list(self._answers):
            answer.fail(failure())

    @contextlib.contextmanager
    def answering(self, answer: GatedWork) -> Iterator[None]:
        """Count an answer as needing an arena until it is finished, within the context."""
        self._answers.add(answer)
        self._on_change()
        try:
            yield
        finally:
            self._answers.remove(answer)
            self._on_change()
