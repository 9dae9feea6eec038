"""aiohttp's connection with custom error responses, which can always be closed."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

logger = logging.getLogger(__name__)

SERVER = "specdec"
"""The Server header; versions would help attackers."""
GARBAGE = (HttpProcessingError, web.RequestPayloadError)
"""Exceptions of malformed HTTP, or of a body that contradicts its headers."""
LINGER_S = 2.0
"""Seconds that a client has to read the response and complete the close."""


class Connection(RequestHandler):
    """Handles one client's requests in order."""

    __slots__ = ("_closing",)

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._closing: asyncio.Transport | None = None

    @property
    def can_abort(self) -> bool:
        """Whether its descriptor is in use and not about to be freed."""
        return self.transport is not None or self._closing is not None

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._request_in_progress)

    def force_close(self) -> None:
        """Close the connection; abort it if the client does not cooperate.

        Closing waits until the client has read all data, and with TLS for its `close_notify`.
        """
        transport = self.transport
        is_closing = transport is not None and transport.is_closing()
        super().force_close()
        if transport is not None:
            self._closing = transport
            if not is_closing:
                self._loop.call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Free the descriptor in the next iteration of the event loop; discard unsent data."""
        if self.transport is not None:
            self.force_close()
        closing, self._closing = self._closing, None
        if closing is not None:
            closing.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Respond to an error outside all handlers, and close the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("a response has already started")
        response = self.refusal(request, status, exc, message)
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    @abstractmethod
    def refusal(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str | None
    ) -> web.Response:
        """Return the response to an error outside all handlers, and log it."""

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log internal errors only: malformed requests are answered as client errors."""
        error = kw.get("exc_info")
        if isinstance(error, GARBAGE):
            logger.debug("%s: what followed was not HTTP", type(error).__name__)
        else:
            super().log_exception(*args, **kw)


class _RefusedConnection(asyncio.Protocol):
    """Closes a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        transport.close()


def limited(
    server: web.Server,
    most: int,
    new: Callable[[], Connection],
    is_busy: Callable[[Connection], bool],
) -> Callable[[], asyncio.BaseProtocol]:
    """Return a protocol factory; at the limit it aborts the oldest idle connection for the new one."""

    def make() -> asyncio.BaseProtocol:
        if len(server.connections) >= most:
            connections = cast(list[Connection], server.connections)
            idle = next(
                (
                    connection
                    for connection in connections
                    if connection.can_abort and not is_busy(connection)
                ),
                None,
            )
            if idle is None:
                return _RefusedConnection()
            idle.abort()
        return new()

    return make
