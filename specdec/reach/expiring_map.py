"""Bounded memory of recent entries."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

REMEMBERED_S = 60.0
MOST = 4096


class ExpiringMap(Generic[K, V]):
    """Drops entries after a time, a minute by default, and the oldest beyond the limit."""

    def __init__(
        self, clock: Callable[[], float], most: int = MOST, remembered_s: float = REMEMBERED_S
    ) -> None:
        self._clock, self._most, self._remembered_s = clock, most, remembered_s
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        self._forget()
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def put(self, key: K, value: V) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (self._clock() + self._remembered_s, value)
        self._forget()

    def _forget(self) -> None:
        now = self._clock()
        while self._entries:
            key, (until, _) = next(iter(self._entries.items()))
            if now < until and len(self._entries) <= self._most:
                return
            del self._entries[key]
