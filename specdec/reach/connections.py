"""The side channel's connections: how many, and how long they may be idle."""

import asyncio
import logging
from collections.abc import Callable

from aiohttp import web

from specdec.http.connection import Connection, limited
from specdec.reach.messages import write_refusal
from specdec.reach.terms import Refusal

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 2048
IDLE_S = 60.0
"""For which a connection may be without a request, or without the end of one's headers."""


class PeerConnection(Connection):
    """Answers malformed HTTP in the form of all other errors, and repeats nothing of it."""

    __slots__ = ()

    def refusal(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str | None
    ) -> web.Response:
        """Return the response to an error outside every handler, and log it."""
        if status >= 500:
            logger.error("a request failed outside its handler", exc_info=error)
        refusal = Refusal("malformed", "This is no HTTP request that can be read.")
        body = write_refusal(refusal)
        return web.Response(status=refusal.status, body=body, content_type="application/json")


def bounded(server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
    """Return the protocol factory."""

    def new() -> Connection:
        return PeerConnection(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # as its own runner has it
            keepalive_timeout=IDLE_S,
            lingering_time=0,  # the rest of a body that was refused is not read
            auto_decompress=False,
        )

    return limited(server, MOST_CONNECTIONS, new, lambda own: own.is_busy)
