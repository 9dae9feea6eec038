"""What a connection keeps of requests that wait behind the one that is handled."""

import asyncio

import pytest
from aiohttp import web

from specdec.server.connections import Connections
from specdec.server.protocol import Connection

BODY = b"x" * 60_000
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
COUNT = 200


async def pending_bytes() -> int:
    """Send many requests at once while the first is handled; return the bytes of bodies that wait."""
    ends, begun = asyncio.Event(), asyncio.Event()
    handled: list[web.BaseRequest] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        handled.append(request)
        begun.set()
        await ends.wait()
        return web.Response()

    server = web.Server(handle)
    factory = Connections(None, 60.0).factory(server)
    listener = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname()[:2])
    writer.write(POST * COUNT)
    await begun.wait()
    (own,) = server.connections
    waiting, before = 0, -1
    while waiting != before:
        before = waiting
        await asyncio.sleep(0.2)
        waiting = sum(payload.total_bytes for _, payload in own._messages)
    ends.set()
    said = b""
    while said.count(b"200 OK") < COUNT:
        said += await reader.readexactly(1)
    assert len(handled) == COUNT
    writer.close()
    listener.close()
    await server.shutdown(1)
    return waiting


def test_few_bodies_wait_behind_the_one_that_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(pending_bytes()) <= 512 << 10
    monkeypatch.setattr(Connection, "__init__", Connection.__bases__[0].__init__)
    assert asyncio.run(pending_bytes()) > 1 << 20, "aiohttp's own limit is noticed"
