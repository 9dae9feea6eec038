"""Limits on the number of connections and on how long each may keep the server waiting."""

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from specdec.http.connection import Connection, limited
from specdec.server.protocol import ApiConnection

MOST_FILES = 1 << 16
"""Limit of open files that the process requests from the system."""
SPARE = 256
"""Descriptors reserved for everything else, and for connections accepted in one batch."""
UNREAD_BYTES = 1 << 16
"""Bytes of a body after which a connection is paused until a handler reads them. aiohttp counts a chunk,
however small, as 16."""


class Connections:
    """Keeps file descriptors free, needed even to refuse a client. Owned by the event loop."""

    def __init__(self, most: int | None, idle_s: float) -> None:
        """Accept at most this many connections."""
        limit = _raise_limit()
        self.idle_s = idle_s
        self.most = min(most or limit, max(limit - SPARE, limit // 2))
        self._busy: set[asyncio.BaseProtocol] = set()
        """Connections with a request in progress."""

    def factory(self, server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
        """Return the protocol factory; at the limit it closes an idle connection for the new one."""

        def protocol() -> Connection:
            return ApiConnection(
                server,
                loop=asyncio.get_running_loop(),
                access_log=None,  # the runner has no access log either: ours says more
                keepalive_timeout=self.idle_s,
                lingering_time=0,  # `Connection` drains the rest of a body, within limits
                read_bufsize=UNREAD_BYTES,
                auto_decompress=False,  # `read_body` decompresses what a handler reads
            )

        return limited(server, self.most, protocol, self._busy.__contains__)

    @contextlib.contextmanager
    def busy(self, connection: RequestHandler) -> Iterator[None]:
        """Protect a connection from being closed while a request is in progress."""
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)


def _raise_limit() -> int:
    """Raise the limit of open files as far as allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
