"""A connection: aiohttp's, but what it answers below the handlers is an error in OpenAI's form too."""

import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from specdec.server.failures import Failure, failure_of

logger = logging.getLogger(__name__)

SERVER = "specdec"
"""The header of this name. Versions would tell whom an attacker's list fits."""
GARBAGE = (HttpProcessingError, web.RequestPayloadError)
"""What clients send that is no HTTP, or a body that is not what its headers say."""


class Connection(RequestHandler):
    """Reads one client's requests, one after the other."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no handler has seen, or what went wrong around all of them, and hang up after it."""
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
        """Send an answer; one that aiohttp raises before any handler is asked is put into our words.

        The rest of a packed body that was refused is not waited for: it would be unpacked without a pause.
        """
        if isinstance(resp, web.HTTPException):
            resp = failure_of(resp).response()
        finished = await super().finish_response(request, resp, start_time)
        if request.headers.get("Content-Encoding") and not request.content.is_eof():
            self.force_close()
        return finished

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log internal errors only: a malformed request is the client's own and is answered as such."""
        error = kw.get("exc_info")
        if isinstance(error, GARBAGE):
            logger.debug("%s: what followed was no HTTP", type(error).__name__)
        else:
            super().log_exception(*args, **kw)
