"""Limits on the number of connections and on how long each may keep the server waiting."""

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from specdec.server.failures import UNKNOWN_ENCODING, Failure
from specdec.server.protocol import Connection

MOST_FILES = 1 << 16
"""The limit of open files that the process asks the system for."""
SPARE = 256
"""Descriptors reserved for everything else, and for connections accepted in one batch."""
LINGER_S = 2.0
"""For reading the rest of a refused body, so that its sender still reads the response."""
ENCODINGS = {"", "identity", "gzip", "deflate"}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connections:
    """Keeps descriptors free: without any the server could not even refuse. Owned by the event loop."""

    def __init__(self, most: int | None, idle_s: float, *, files: int = 1) -> None:
        """Take so many connections at most, each of which needs so many descriptors."""
        limit = _raise_limit()
        self.idle_s = idle_s
        self.most = min(most or limit, max(limit - SPARE, limit // 2) // files)
        self._busy: set[asyncio.BaseProtocol] = set()
        """Connections with a request in progress."""

    def factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Return the protocol factory; at the limit it closes an idle connection for the new one."""

        def new() -> Connection:
            return Connection(
                server,
                loop=asyncio.get_running_loop(),
                access_log=None,  # type: ignore[arg-type]  # as its own runner has it: our log says more
                keepalive_timeout=self.idle_s,
                lingering_time=LINGER_S,
            )

        def make() -> asyncio.BaseProtocol:
            own = server.connections
            if len(own) < self.most:
                return new()
            idle = next((each for each in own if each.transport and each not in self._busy), None)
            if idle is None:
                return _Refused()
            idle.force_close()  # its descriptor is free when the event loop comes round again
            return new()

        return make

    @contextlib.contextmanager
    def busy(self, connection: RequestHandler) -> Iterator[None]:
        """Protect a connection from being closed while a request is in progress."""
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)


class _Refused(asyncio.Protocol):
    """Closes a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        transport.close()


async def expect_later(request: web.Request) -> None:
    """Hold `100 Continue` back until the body is wanted: `read_body` sends it."""
    if not _waits(request):
        raise web.HTTPExpectationFailed


def _waits(request: web.Request) -> bool:
    """Tell whether the client waits for `100 Continue`."""
    return request.headers.get("Expect", "").lower() == "100-continue"


async def read_body(request: web.Request, limit_s: float) -> None:
    """Read a body into the request; refuse one that is too slow or too large."""
    if (request.content_length or 0) > request.client_max_size:
        raise Failure(
            413,
            f"The body has {request.content_length:,} bytes, and max_body_bytes, a setting of the server, "
            f"allows {request.client_max_size:,}.",
        )
    if request.headers.get("Content-Encoding", "").strip().lower() not in ENCODINGS:
        raise Failure(415, UNKNOWN_ENCODING)
    try:
        async with asyncio.timeout(limit_s):
            if _waits(request) and request.version >= (1, 1):
                await request.writer.write(CONTINUE)
                request.writer.output_size = 0  # it is no part of the answer
            await request.read()
    except TimeoutError:
        raise Failure(408, f"The body did not come within {limit_s:g} s.", code="body_timeout") from None
    except web.RequestPayloadError:
        raise Failure(400, "the body cannot be read; check its Content-Encoding and length.") from None


def _raise_limit() -> int:
    """Raise the limit of open files as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
