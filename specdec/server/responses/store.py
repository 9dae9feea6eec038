"""Stored responses, so that later requests can continue them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.server.failures import Failure

OVERHEAD = 1024
"""Overhead of an entry in bytes."""


class StoredResponse(NamedTuple):
    """A response with its input and output items, as JSON."""

    items: bytes
    response: bytes
    previous: str | None
    """Id of the response it continues."""
    num_items: int = 0
    """Number of items."""
    used_s: float = 0.0

    @property
    def size(self) -> int:
        return len(self.items) + len(self.response) + OVERHEAD


@dataclass(slots=True)
class CallerResponses:
    """One caller's responses, least recently used first."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size: int = 0


class ResponseStore:
    """Stores responses by caller; callers only see their own.

    Both limits apply to all callers together. Beyond them, the largest caller loses its least recently used
    response. Using a response also uses its predecessors, so a conversation loses its end before its
    beginning. Long answers are written in threads, hence the lock.
    """

    def __init__(
        self, most: int, most_bytes: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.most, self.most_bytes, self.keep_s, self._clock = most, most_bytes, keep_s, clock
        self._by_caller: dict[str, CallerResponses] = {}
        self._lock = threading.RLock()

    @property
    def count(self) -> int:
        with self._lock:
            return sum(len(shelf.entries) for shelf in self._by_caller.values())

    @property
    def size(self) -> int:
        with self._lock:
            return sum(shelf.size for shelf in self._by_caller.values())

    def put(self, caller: str, name: str, stored: StoredResponse) -> None:
        """Store a response, unless it exceeds the whole limit."""
        if not self.most or stored.size > self.most_bytes:
            return
        with self._lock:
            shelf = self._by_caller.setdefault(caller, CallerResponses())
            shelf.entries[name] = stored
            shelf.size += stored.size
            self._use(shelf, name)
            self._expire()
            while self.count > self.most or self.size > self.most_bytes:
                by_count = self.count > self.most
                largest = max(self._by_caller, key=lambda key: self._weight(key, by_count=by_count))
                self._drop(largest, next(iter(self._by_caller[largest].entries)))

    def get(self, caller: str, name: str) -> StoredResponse:
        """Return a caller's response; raise if it is unknown or another caller's."""
        with self._lock:
            stored = self._find(caller, name, None)
            self._use(self._by_caller[caller], name)
            return stored

    def _find(self, caller: str, name: str, param: str | None) -> StoredResponse:
        self._expire()
        shelf = self._by_caller.get(caller)
        if shelf is None or name not in shelf.entries:
            reason = "it may have been evicted" if self.most else "none are stored here"
            raise Failure(
                404,
                f"{param or 'response'}: no response {name!r:.80} is stored for this key; {reason}. Send the "
                "conversation as input instead.",
                param=param,
                code="previous_response_not_found" if param else "not_found",
            )
        return shelf.entries[name]

    def history(self, caller: str, name: str | None) -> list[StoredResponse]:
        """Return the chain of responses that ends with this one, the first one first."""
        history, last = list[StoredResponse](), name
        with self._lock:
            while name is not None:
                history.append(self._find(caller, name, "previous_response_id"))
                name = history[-1].previous
            if history:
                self._use(self._by_caller[caller], last)
        return history[::-1]

    def delete(self, caller: str, name: str) -> None:
        with self._lock:
            self.get(caller, name)
            self._drop(caller, name)

    def _use(self, shelf: CallerResponses, name: str | None) -> None:
        """Mark a response as used, then its predecessors."""
        while name is not None and name in shelf.entries:
            shelf.entries[name] = shelf.entries[name]._replace(used_s=self._clock())
            shelf.entries.move_to_end(name)
            name = shelf.entries[name].previous

    def _weight(self, caller: str, *, by_count: bool) -> int:
        shelf = self._by_caller[caller]
        return len(shelf.entries) if by_count else shelf.size

    def _drop(self, caller: str, name: str) -> None:
        shelf = self._by_caller[caller]
        shelf.size -= shelf.entries.pop(name).size
        if not shelf.entries:
            del self._by_caller[caller]

    def _expire(self) -> None:
        """Drop expired responses; entries are ordered by last use."""
        oldest_s = self._clock() - self.keep_s
        for caller, shelf in list(self._by_caller.items()):
            while shelf.entries and (first := next(iter(shelf.entries.items())))[1].used_s < oldest_s:
                self._drop(caller, first[0])
