"""Receive request bodies on demand, in bounded memory."""

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from aiohttp import web

from specdec.server.failures import UNKNOWN_ENCODING, Failure

ARRIVING_BYTES = 192 << 20
"""Memory for bodies being received or waiting to be parsed, as sent: they are decompressed in a few threads.
One caller gets at most half of it."""
BODIES = 4
"""Maximum-size bodies that a budget holds; a single one needs three, by the rule of `BodyBudget`."""
PIECE_BYTES = 1 << 18
"""Size of the pieces of an incomplete body: growing one buffer fragments the heap."""
MOST_PIECES, PIECE_LEAST = 1024, 256
"""Chunks of a body that may have any size, and minimum average bytes of further ones. The event loop spends
as much on a chunk of one byte as on one of 2 KiB: four clients that sent 3 MB each in such chunks stopped all
streams for 5 s."""
ENCODINGS = {"": None, "identity": None, "gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's window argument by Content-Encoding."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyBudget:
    """Bounds the memory of all request bodies. Owned by the event loop.

    A body may grow while its own bytes, its caller's and all bodies' together fit into `most`. So one caller
    gets at most half, a new caller always finds free memory, and of one caller's bodies large ones are
    refused before small ones.
    """

    def __init__(self, most: int, max_body_bytes: int) -> None:
        self.most = max(most, BODIES * max_body_bytes)
        self.held_bytes = 0
        self._held: Counter[str] = Counter()
        """Bytes by caller."""

    @contextlib.contextmanager
    def holding(self, caller: str) -> Iterator["HeldBody"]:
        """Count a body of a caller within the context."""
        body = HeldBody(self, caller)
        try:
            yield body
        finally:
            self._count(body, -body.num_bytes)
            if not self._held[caller]:
                del self._held[caller]

    def admit(self, body: "HeldBody", num_bytes: int) -> None:
        """Count more bytes of a body, or raise."""
        total = body.num_bytes + self._held[body.caller] + self.held_bytes + 3 * num_bytes
        if total > self.most:
            raise Failure(
                429,
                f"Request bodies take {self.held_bytes:,} of {self.most:,} bytes, and yours too large a "
                "part; try again later.",
                code="too_many_requests",
                headers={"Retry-After": "1"},
            )
        self._count(body, num_bytes)

    def _count(self, body: "HeldBody", num_bytes: int) -> None:
        body.num_bytes += num_bytes
        self._held[body.caller] += num_bytes
        self.held_bytes += num_bytes


class HeldBody:
    """A body counted in a budget."""

    def __init__(self, budget: BodyBudget, caller: str) -> None:
        self.caller, self.num_bytes, self._budget = caller, 0, budget

    def add(self, num_bytes: int) -> None:
        """Count more bytes, or raise a `Failure` if the budget is exhausted."""
        self._budget.admit(self, num_bytes)


async def expect_later(request: web.Request) -> None:
    """Delay `100 Continue` until `read_body` reads the body."""
    if not _waits(request):
        raise web.HTTPExpectationFailed


def _waits(request: web.Request) -> bool:
    """Return whether the client waits for `100 Continue`."""
    return request.headers.get("Expect", "").lower() == "100-continue"


class ReceivedBody(NamedTuple):
    """A body as sent."""

    data: bytes
    window: int | None
    """zlib's window argument; None: not compressed."""
    most: int
    """Maximum decompressed bytes."""

    @property
    def is_packed(self) -> bool:
        return self.window is not None

    def unpack(self) -> bytes:
        """Return the decompressed body. Takes up to a tenth of a second: run it in a thread."""
        if self.window is None or not self.data:
            return self.data
        # Some clients send raw deflate; zlib's header always has these bits.
        is_bare = self.window == zlib.MAX_WBITS and self.data[0] & 0xF != zlib.DEFLATED
        unpacker = zlib.decompressobj(-self.window if is_bare else self.window)
        try:
            unpacked = unpacker.decompress(self.data, self.most + 1)
        except zlib.error:
            raise _unreadable() from None
        if len(unpacked) > self.most:
            raise web.HTTPRequestEntityTooLarge(self.most)
        if not unpacker.eof or unpacker.unused_data:
            raise _unreadable()
        return unpacked


async def read_body(request: web.Request, body: HeldBody, limit_s: float) -> ReceivedBody:
    """Receive a body; raise if it is too slow, or too large alone or together with others."""
    max_bytes = request.client_max_size
    if (request.content_length or 0) > max_bytes:
        raise Failure(
            413,
            f"The body has {request.content_length:,} bytes, and max_body_bytes, a setting of the server, "
            f"allows {max_bytes:,}.",
        )
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise Failure(415, UNKNOWN_ENCODING)
    chunks, chunk, count = list[bytes](), bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            if _waits(request) and request.version >= (1, 1):
                await request.writer.write(CONTINUE)
                request.writer.output_size = 0  # not part of the response
            while request.can_read_body:  # aiohttp's shared reader of empty bodies ends only once
                data, is_chunk_end = await request.content.readchunk()
                body.add(len(data))
                count += is_chunk_end
                if is_shredded(count, body.num_bytes):
                    raise Failure(400, f"The body has {count:,} small chunks; send larger ones.")
                if body.num_bytes > max_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_bytes)
                chunk += data
                if len(chunk) >= PIECE_BYTES:
                    chunks.append(bytes(chunk))
                    chunk.clear()
    except TimeoutError:
        raise Failure(408, f"The body did not arrive within {limit_s:g} s.", code="body_timeout") from None
    except web.RequestPayloadError:
        raise _unreadable() from None
    return ReceivedBody(b"".join((*chunks, chunk)), ENCODINGS[encoding], max_bytes)


def is_shredded(count: int, num_bytes: int) -> bool:
    """Return whether a body has too many chunks for its size."""
    return count > MOST_PIECES + num_bytes // PIECE_LEAST


def _unreadable() -> Failure:
    return Failure(400, "the body cannot be read; check its Content-Encoding and length.")
