"""Limits of the side channel's connections: their number and idle time."""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from specdec.http.connection import Connection, limited
from specdec.reach.messages import write_refusal
from specdec.reach.protocol import ReachError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 2048
IDLE_S = 60.0
"""Seconds a connection may go without a request, or without the end of its headers."""


class PeerConnection(Connection):
    """Answers malformed HTTP like other errors, without echoing it."""

    __slots__ = ()

    def refusal(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str | None
    ) -> web.Response:
        """Return the response to an error outside all handlers, and log it."""
        if status >= 500:
            logger.error("a request failed outside its handler", exc_info=error)
        refusal = ReachError("malformed", "The request is not valid HTTP.")
        body = write_refusal(refusal)
        return web.Response(status=refusal.status, body=body, content_type="application/json")


def bounded(server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
    """Return a factory of connections that limits their number."""

    def protocol() -> Connection:
        return PeerConnection(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # the runner has no access log either
            keepalive_timeout=IDLE_S,
            lingering_time=0,  # do not read the rest of a refused body
            auto_decompress=False,
        )

    return limited(server, MOST_CONNECTIONS, protocol, lambda connection: connection.is_busy)
