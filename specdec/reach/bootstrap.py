"""Bootstrap rooms of SGLang's routers: both servers get the same request at the same time."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from specdec.reach.expiring_map import ExpiringMap
from specdec.reach.protocol import ReachError, Reason

T = TypeVar("T")

MOST_WAITING = 1024
"""Maximum requests waiting for rooms that do not exist yet."""


class BootstrapRooms(Generic[T]):
    """All rooms. Owned by the event loop's thread. Only requests prefilled here create rooms."""

    def __init__(self, clock: Callable[[], float], wait_s: float, most_waiting: int = MOST_WAITING) -> None:
        self._wait_s, self._most_waiting = wait_s, most_waiting
        self._rooms: dict[int, T] = {}
        self._ended: ExpiringMap[int, Reason] = ExpiringMap(clock)
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self._num_waiting = 0
        self._expected: dict[int, bool] = {}
        """Rooms of requests waiting for memory, and whether a reader has stopped waiting for each."""

    @contextlib.contextmanager
    def expecting(self, rooms: Sequence[int]) -> Iterator[None]:
        """Within the context, track whether readers of these future rooms keep asking for them."""
        self._expected |= dict.fromkeys(rooms, False)
        try:
            yield
        finally:
            for room in rooms:
                self._expected.pop(room, None)

    def is_left(self, room: int) -> bool:
        """Return whether the reader of an expected room has asked for it and is not asking now.

        A reader about to ask again learns that its prompt is not prefilled. Waiting for it would let the
        readers behind it leave as well.
        """
        return self._expected.get(room, False) and room not in self._waiting

    def check_free(self, room: int) -> None:
        """Raise if a request has or had this room."""
        if room in self._rooms or self._ended.get(room) is not None:
            raise ReachError(
                "room_used",
                "bootstrap_room: already used by another request; draw a new random number of 63 bits.",
                field="bootstrap_room",
            )

    def add(self, room: int, lease: T) -> None:
        self._rooms[room] = lease
        self._wake(room)

    def fail(self, room: int) -> None:
        """Notify a room's reader, now or when it asks, that its prompt is not prefilled here.

        For requests refused before they were lent.
        """
        if room not in self._rooms and self._ended.get(room) is None:
            self._ended.put(room, "prefill_failed")
            self._wake(room)

    def end(self, room: int, reason: Reason) -> None:
        """Remove a room and remember the reason for a while."""
        del self._rooms[room]
        self._ended.put(room, reason)

    async def find(self, room: int) -> T:
        """Wait for a room. Nothing is stored for one that does not exist."""
        if room not in self._rooms and self._ended.get(room) is None:
            await self._wait(room)
        lease, reason = self._rooms.get(room), self._ended.get(room)
        if lease is not None:
            return lease
        match reason:
            case None:
                raise ReachError("unknown_room", "No request has opened this room yet; try again.")
            case "prefill_failed":
                raise ReachError(
                    "prefill_failed", "The prefill failed; prefill the prompt on the other server."
                )
            case "room_used":
                raise ReachError("room_used", "This room has been used; a room serves one request.")
            case _:
                raise ReachError("lease_over", "This room's lease is over; prefill the prompt again.")

    async def _wait(self, room: int) -> None:
        if self._num_waiting >= self._most_waiting:
            raise ReachError("busy", "Too many requests are waiting for rooms; try again later.")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(room, set()).add(waiter)
        self._num_waiting += 1
        try:
            await asyncio.wait([waiter], timeout=self._wait_s)
        finally:
            self._num_waiting -= 1
            self._waiting[room].discard(waiter)
            if not self._waiting[room]:
                del self._waiting[room]
            if room in self._expected:
                self._expected[room] = True

    def _wake(self, room: int) -> None:
        for waiter in self._waiting.get(room, ()):
            if not waiter.done():
                waiter.set_result(None)
