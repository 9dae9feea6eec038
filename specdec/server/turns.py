"""Turns of requests on the event loop, by caller."""

import asyncio
from collections import deque


class Turns:
    """Lets one request begin in each iteration of the event loop; callers take turns.

    Streams, and requests of other callers, then wait for one request of a caller, however many it sends at
    once. Owned by the event loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By caller, in the order of their turns; each has some."""
        self._is_taken = False
        """Whether a request has begun in this iteration."""

    async def wait(self, caller: str) -> None:
        """Wait for a caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next, loop)
            return
        turn = loop.create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin the next request, if its client has not left, and look again in the next iteration."""
        while self._waiting:
            caller = next(iter(self._waiting))
            own = self._waiting.pop(caller)
            turn = own.popleft()
            if own:
                self._waiting[caller] = own
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._next, loop)
                return
        self._is_taken = False
