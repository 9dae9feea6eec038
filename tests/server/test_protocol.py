"""Pipelined requests that wait behind the one being handled."""

import asyncio
import contextlib

import pytest
from aiohttp import web

from specdec.http import connection
from specdec.http.connection import Connection
from specdec.server.connections import UNREAD_BYTES, Connections
from specdec.server.failures import Failure
from specdec.server.protocol import ApiConnection
from specdec.server.receive import MOST_PIECES, BodyBudget, read_body

BODY = b"x" * 60_000
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
COUNT = 200


async def pending_bytes() -> int:
    """Send many requests at once while the first is handled; return the bytes of waiting bodies."""
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


def test_few_pipelined_bodies_are_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(pending_bytes()) <= 512 << 10
    monkeypatch.setattr(ApiConnection, "__init__", Connection.__init__)
    assert asyncio.run(pending_bytes()) > 1 << 20, "aiohttp's own limit is noticed"


CHUNKS = b"1\r\nx\r\n" * 100_000


async def chunks_read(*, reads: bool) -> tuple[bytes, int]:
    """Send a body in chunks of one byte; return the answer's head, and the number of bytes received."""
    bodies: list[web.BaseRequest] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        bodies.append(request)
        if not reads:
            return web.Response(status=404)
        with BodyBudget(1 << 30, 1 << 20).holding("") as held, pytest.raises(Failure) as refused:
            await read_body(request, held, 60.0)
        return refused.value.response()

    server = web.Server(handle)
    factory = Connections(None, 60.0).factory(server)
    listener = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname()[:2])
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS)
    head = await reader.readuntil(b"\r\n\r\n")
    while server.connections:
        await asyncio.sleep(0.01)
    writer.close()
    listener.close()
    await server.shutdown(1)
    return head, bodies[0].content.total_bytes


@pytest.mark.parametrize(("reads", "status"), [(True, b"400"), (False, b"404")])
def test_bodies_of_tiny_chunks_are_cut_off(reads: bool, status: bytes) -> None:
    """Each costs the event loop as much as one of kilobytes, whether or not the body is read."""
    head, taken = asyncio.run(chunks_read(reads=reads))
    assert head.startswith(b"HTTP/1.1 " + status)
    assert taken <= 3 * MOST_PIECES + UNREAD_BYTES // 8


async def served_beside_unread() -> tuple[int, bytes]:
    """Serve one connection that goes idle with unsent data, at a limit of one connection.

    Return how many connections are left a moment later, and what the next client receives.
    """

    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response()

    server = web.Server(handle)
    factory = Connections(1, 0.2).factory(server)
    listener = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    address = listener.sockets[0].getsockname()[:2]
    _, unread = await asyncio.open_connection(*address, limit=1)
    while not server.connections:
        await asyncio.sleep(0.01)
    (own,) = server.connections
    transport = own.transport
    assert isinstance(transport, asyncio.Transport)
    transport.write(bytes(16 << 20))
    while own.transport:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    left = len(server.connections)
    reader, writer = await asyncio.open_connection(*address)
    said = b""
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        said = await reader.read()
    for each in (unread, writer, transport):
        each.close()
    unread.transport.abort()
    listener.close()
    while server.connections:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # the clients' side
    return left, said


@pytest.mark.parametrize("linger_s", [0.05, 60.0])
def test_a_client_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, linger_s: float
) -> None:
    """It is aborted after a while, or at the connection limit for the next client."""
    monkeypatch.setattr(connection, "LINGER_S", linger_s)
    left, said = asyncio.run(served_beside_unread())
    assert left == (linger_s > 1) and said.startswith(b"HTTP/1.1 200 OK")
    monkeypatch.setattr(Connection, "force_close", Connection.__bases__[0].force_close)
    assert asyncio.run(served_beside_unread()) == (1, b""), "aiohttp waits for the client"
