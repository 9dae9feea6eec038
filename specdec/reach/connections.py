"""The side channel's connections: how many, how long they may be idle, and what is no HTTP at all."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from specdec.reach.messages import write_refusal
from specdec.reach.terms import Refusal

logger = logging.getLogger(__name__)

SERVER = "specdec"
MOST_CONNECTIONS = 2048
IDLE_S = 60.0
"""For which a connection may be without a request, or without the end of one's headers."""


class Connection(RequestHandler):
    """Answers what is no HTTP in the form of all other errors, and keeps it out of the log."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        return self.transport is not None and not self._request_in_progress

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer, repeat nothing of what was sent, and close the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= 500:
            logger.error("a request failed outside its handler", exc_info=exc)
        refusal = Refusal("malformed", "This is no HTTP request that can be read.")
        body = write_refusal(refusal)
        response = web.Response(status=refusal.status, body=body, content_type="application/json")
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what is our own fault."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError | web.RequestPayloadError):
            super().log_exception(*args, **kw)


def bounded(server: web.Server) -> Callable[[], asyncio.BaseProtocol]:
    """Return the protocol factory; at the limit it closes the oldest idle connection for the new one."""

    def make() -> asyncio.BaseProtocol:
        if len(server.connections) >= MOST_CONNECTIONS:
            idle = next(
                (own for own in server.connections if isinstance(own, Connection) and own.is_idle), None
            )
            if idle is None:
                return _Refused()
            idle.force_close()
        return Connection(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as its own runner has it
            keepalive_timeout=IDLE_S,
            lingering_time=0,  # the rest of a body that was refused is not read
            auto_decompress=False,
        )

    return make


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close a connection beyond the limit."""
        transport.close()
