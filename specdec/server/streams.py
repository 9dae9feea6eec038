"""Responses as server-sent events, for clients that may be slow or disconnected."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER of zero: unsent data is discarded."""
Beside = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Runs work in a thread, in its caller's turn."""
AT_A_TIME = 1 << 18
"""Bytes of a long response encoded before the client must have received them."""
DONE = b"data: [DONE]\n\n"


class EventStream:
    """A streamed response. Headers are sent with its first event, so earlier errors keep their own status."""

    def __init__(self, request: web.Request, stall_s: float, *, is_typed: bool) -> None:
        self.request, self.stall_s, self.is_typed = request, stall_s, is_typed
        self._response = web.StreamResponse(headers=HEADERS)

    @property
    def number(self) -> str:
        """The request's id."""
        return str(self.request["headers"]["X-Request-ID"])

    @property
    def begun(self) -> bool:
        return self._response.prepared

    def framed(self, events: Iterable[Mapping[str, Any]]) -> bytes:
        """Return encoded events; thread-safe."""
        return b"".join(map(self._framed, events))

    async def send(self, data: bytes) -> None:
        """Send framed events with back-pressure; abort a client that does not read."""
        async with read_within(self.request, self.stall_s):
            if not self.begun:
                await self._response.prepare(self.request)
            await self._response.write(data)

    async def end(self) -> web.StreamResponse:
        if not self.is_typed:
            await self.send(DONE)
        async with read_within(self.request, self.stall_s):
            await self._response.write_eof()
        return self._response

    def _framed(self, event: Mapping[str, Any]) -> bytes:
        name = b"event: %b\n" % str(event["type"]).encode() if self.is_typed else b""
        return b"%bdata: %b\n\n" % (name, json.dumps(event, default=list).encode())


@contextlib.asynccontextmanager
async def read_within(request: web.Request, stall_s: float) -> AsyncIterator[None]:
    """Disconnect a client that does not read data sent in this context.

    Its connection is reset, so that the system discards unsent data too.
    """
    _check_client(request.transport)
    try:
        async with asyncio.timeout(stall_s):
            yield
    except TimeoutError:
        if transport := request.transport:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            transport.abort()
        raise ConnectionResetError("the client does not read") from None


def _check_client(transport: asyncio.Transport | None) -> None:
    """Raise if a TLS client has disconnected while its further requests were queued.

    asyncio reports that only when reading resumes; until then it drops writes and logs a warning each time.
    """
    tls = getattr(transport, "_ssl_protocol", None)
    if transport and getattr(tls, "_eof_received", False):
        transport.abort()
        raise ConnectionResetError("the client has left")


async def send_pieces(
    request: web.Request, pieces: Iterator[str], stall_s: float, encode: Beside | None
) -> web.StreamResponse:
    """Send a JSON document in pieces, each encoded with `encode`; None: it is short.

    A short one has a Content-Length. A long one is encoded as the client reads.
    """
    if encode is None:
        short = web.Response(text="".join(pieces), content_type="application/json")
        return await send_whole(request, short, stall_s)
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    while data := await encode(partial(_next, pieces)):
        async with read_within(request, stall_s):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
    async with read_within(request, stall_s):
        await response.write_eof()
    return response


def _next(pieces: Iterator[str]) -> bytes:
    """Encode the next pieces, enough for a turn of a thread; empty at the end."""
    data = bytearray()
    for text in pieces:
        data += text.encode()
        if len(data) >= AT_A_TIME:
            break
    return bytes(data)


async def send_whole(request: web.Request, response: web.Response, stall_s: float) -> web.Response:
    """Send a whole response to a client that may be slow."""
    if not response.prepared:
        async with read_within(request, stall_s):
            await response.prepare(request)
            await response.write_eof()
    return response
