"""Connections of the API servers, with aiohttp's own errors in OpenAI's format."""

import asyncio
import contextlib
import logging
from typing import Any

from aiohttp import web

from specdec.http.connection import LINGER_S, Connection
from specdec.server.failures import Failure, failure_of
from specdec.server.receive import is_shredded

logger = logging.getLogger(__name__)


class ApiConnection(Connection):
    """Handles one client's requests in order, and drains refused bodies."""

    __slots__ = ()

    def __init__(self, *args: Any, **kw: Any) -> None:
        """Pause reading while two requests are queued, instead of aiohttp's 32."""
        super().__init__(*args, **kw)
        self._max_msg_queue_size, self._msg_queue_resume_size = 2, 0

    def refusal(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str | None
    ) -> web.Response:
        """Return the response to an error outside all handlers, and log it."""
        failure = failure_of(error) if isinstance(error, Exception) else Failure(status, message or "")
        if failure.trace:
            logger.error("a request failed outside its handler", exc_info=failure.trace)
        else:
            logger.info("%s sent an invalid request: %s", request.remote, failure)
        return failure.response()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, and drain the rest of its request's body.

        Errors that aiohttp raises before any handler are converted to our format.
        """
        if isinstance(resp, web.HTTPException):
            resp = failure_of(resp).response()
        finished = await super().finish_response(request, resp, start_time)
        if finished[1] or self._force_close:  # the client has disconnected, or the server stops
            return finished
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                pieces = num_bytes = 0
                while not (request.content.is_eof() or is_shredded(pieces, num_bytes)):
                    pieces, num_bytes = pieces + 1, num_bytes + len((await request.content.readchunk())[0])
        return finished
