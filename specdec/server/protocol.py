"""aiohttp's connection, with its own errors in OpenAI's form too."""

import asyncio
import contextlib
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from specdec.server.failures import Failure, failure_of
from specdec.server.receive import is_shredded

logger = logging.getLogger(__name__)

SERVER = "specdec"
"""The Server header; versions would help attackers."""
GARBAGE = (HttpProcessingError, web.RequestPayloadError)
"""Errors of malformed HTTP, or of a body that contradicts its headers."""
LINGER_S = 2.0
"""For reading the rest of a refused body, so that its sender still reads the response."""


class Connection(RequestHandler):
    """Reads one client's requests in turn."""

    __slots__ = ("_closing",)

    def __init__(self, *args: Any, **kw: Any) -> None:
        """Stop reading while two requests wait behind the one that is handled, instead of 32."""
        super().__init__(*args, **kw)
        self._max_msg_queue_size, self._msg_queue_resume_size = 2, 0
        self._closing: asyncio.Transport | None = None

    @property
    def can_abort(self) -> bool:
        """Return whether its descriptor is in use, and not about to be free."""
        return self.transport is not None or self._closing is not None

    def force_close(self) -> None:
        """Close the connection; abort it if the client does not take its part in that.

        Closing waits until the client has read what was sent to it, and with TLS for its `close_notify`.
        """
        transport = self.transport
        is_closing = transport is not None and transport.is_closing()
        super().force_close()
        if transport is not None:
            self._closing = transport
            if not is_closing:
                self._loop.call_later(LINGER_S, self.abort)

    def abort(self) -> None:
        """Free the descriptor when the event loop comes round again; discard unsent data."""
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
        """Respond to an error outside every handler, and close the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        failure = failure_of(exc) if isinstance(exc, Exception) else Failure(status, message or "")
        if failure.trace:
            logger.error("a request failed outside its handler", exc_info=failure.trace)
        else:
            logger.info("%s sent what is no request: %s", request.remote, failure)
        response = failure.response()
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, and discard the rest of its request's body.

        An error that aiohttp raises before any handler gets our form.
        """
        if isinstance(resp, web.HTTPException):
            resp = failure_of(resp).response()
        finished = await super().finish_response(request, resp, start_time)
        if finished[1] or self._force_close:  # the client has left, or the server stops
            return finished
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                pieces = num_bytes = 0
                while not (request.content.is_eof() or is_shredded(pieces, num_bytes)):
                    pieces, num_bytes = pieces + 1, num_bytes + len((await request.content.readchunk())[0])
        return finished

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log internal errors only: a malformed request is the client's own and is answered as such."""
        error = kw.get("exc_info")
        if isinstance(error, GARBAGE):
            logger.debug("%s: what followed was no HTTP", type(error).__name__)
        else:
            super().log_exception(*args, **kw)
