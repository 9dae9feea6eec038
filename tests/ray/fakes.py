"""Stand-in replicas in the test's event loop, with faults on demand."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDictProxy

SOON_S = 20.0
"""Timeout for expected events: long enough for a machine under load."""


@dataclass
class Seen:
    """A request as a replica has received it."""

    method: str
    path: str
    headers: CIMultiDictProxy[str]
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request is cancelled because its sender has disconnected."""


Answering = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


async def ok(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"ok": True})


def refusing(status: int, **headers: str) -> Answering:
    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": f"refused with {status}"}}, status=status, headers=headers
        )

    return answer


async def reset(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Reset the connection, as a killed process does."""
    assert request.transport
    request.transport.abort()
    await asyncio.sleep(SOON_S)
    raise AssertionError


async def never(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Send nothing until the other side disconnects."""
    try:
        await asyncio.sleep(10 * SOON_S)
    except asyncio.CancelledError:
        seen.left.set()
        raise
    raise AssertionError


def streaming(*events: bytes, pause_s: float = 0.0, then: Answering | None = None) -> Answering:
    """Return a handler that sends events, one per write, and then ends or runs `then`."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(pause_s)
        if then:
            await then(request, seen)
        await response.write_eof()
        return response

    return answer


class Fake:
    """A stand-in for a replica."""

    def __init__(self, answer: Answering = ok) -> None:
        self.answer = answer
        self.seen: list[Seen] = []

    async def __aenter__(self) -> "Fake":
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _any(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.method, request.raw_path, request.headers, await request.read())
        self.seen.append(seen)
        return await self.answer(request, seen)


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(SOON_S):
        while not is_so():
            await asyncio.sleep(0.005)
