"""The playground at `/`: the static files of `web/` and their security headers."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import PurePath

from aiohttp import web

FOLDER = "/web/"
"""The route of the files beside the page itself, which is at `/`."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No external resources, no inline scripts, no framing by other sites."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

Answer = Callable[[web.Request], Awaitable[web.Response]]


def playground() -> Mapping[str, Answer]:
    """Read the files once; return their handlers by route."""
    answers = {}
    for file in files("specdec.server").joinpath("web").iterdir():
        path = "/" if file.name == "index.html" else FOLDER + file.name
        answers[path] = _answering(file.read_bytes(), KINDS[PurePath(file.name).suffix])
    return answers


def _answering(data: bytes, kind: str) -> Answer:
    """Make a handler that serves a file with an ETag."""
    etag = hashlib.sha256(data).hexdigest()[:32]

    async def answer(request: web.Request) -> web.Response:
        known = request.if_none_match and any(own.value == etag for own in request.if_none_match)
        if known:
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=data, content_type=kind, charset="utf-8", headers=HEADERS)
        response.etag = etag
        return response

    return answer
