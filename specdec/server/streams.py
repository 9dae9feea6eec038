"""Responses as server-sent events, for clients that may be slow or gone."""

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
"""Does work in a thread, in its caller's turn."""
AT_A_TIME = 1 << 18
"""Bytes of a long answer that are written before the client must have taken them."""
DONE = b"data: [DONE]\n\n"


class EventStream:
    """One streamed response. It starts with its first event, so that an earlier error has its own status."""

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
        """Return events as they are sent, which any thread may do."""
        return b"".join(map(self._framed, events))

    async def send(self, data: bytes) -> None:
        """Send framed events, and wait while the client does not read; abort one that never does."""
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
    """Give a client up that does not read what is sent in here.

    Its connection is reset: the system, too, is to keep nothing for it.
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
    """Raise an error if a TLS client has left while its further requests waited.

    asyncio reports that only once reading goes on; until then it drops what is written and logs a warning
    each time.
    """
    tls = getattr(transport, "_ssl_protocol", None)
    if transport and getattr(tls, "_eof_received", False):
        transport.abort()
        raise ConnectionResetError("the client has left")


async def send_pieces(
    request: web.Request, pieces: Iterator[str], stall_s: float, beside: Beside | None
) -> web.StreamResponse:
    """Send a JSON document piece by piece, each written `beside` the event loop; None: it is short.

    A short one has its length. What of a long one the client has not read is not written yet.
    """
    if beside is None:
        whole = web.Response(text="".join(pieces), content_type="application/json")
        return await send_whole(request, whole, stall_s)
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    while data := await beside(partial(_next, pieces)):
        async with read_within(request, stall_s):
            if not response.prepared:
                await response.prepare(request)
            await response.write(data)
    async with read_within(request, stall_s):
        await response.write_eof()
    return response


def _next(pieces: Iterator[str]) -> bytes:
    """Write the next pieces, as many as are worth a thread's turn; nothing at the end."""
    data = bytearray()
    for piece in pieces:
        data += piece.encode()
        if len(data) >= AT_A_TIME:
            break
    return bytes(data)


async def send_whole(request: web.Request, response: web.Response, stall_s: float) -> web.Response:
    """Send a response that is not streamed to a client that may be slow."""
    if not response.prepared:
        async with read_within(request, stall_s):
            await response.prepare(request)
            await response.write_eof()
    return response
