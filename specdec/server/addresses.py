"""Helpful 404 errors: usually the base URL lacks `/v1`, or has it twice."""

import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from specdec.server.anthropic.errors import PATH, speaks_anthropic
from specdec.server.failures import Failure

MISPLACED = re.compile(
    r"(?P<base>(?:/v1)*)(?P<call>/(?:chat/completions?|completions?|models|responses|messages|embeddings))(?:/.*)?"
)
"""Paths of this server, and llama.cpp's `/completion`, after any number of `/v1`."""


@web.middleware
async def name_address(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer an unknown path with a suggestion, if it resembles a known one."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        raise Failure(404, _nothing_at(request.path, request.headers)) from None


def _nothing_at(path: str, headers: Mapping[str, str]) -> str:
    match = MISPLACED.fullmatch(path)
    suggestion = match and f"/v1{re.sub('completion$', 'completions', match['call'])}"
    if match is None or path.startswith(f"{suggestion}/") or path == suggestion:
        return "There is nothing at this address; /openapi.json lists the addresses."
    if suggestion == PATH or speaks_anthropic(path, headers):
        base = "The base URL of Anthropic's clients is without /v1"
    else:
        base = "The base URL of OpenAI's clients ends with /v1"
    return f"There is nothing at this address; did you mean {suggestion}? {base}."
