"""The playground at `/`: the static files of `web/` and their security headers."""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from aiohttp import web

WEB = files("specdec.server").joinpath("web")
FOLDER = "/web/"
"""Route of all files but the page itself, which is at `/`."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No external resources, no inline scripts, no text parsed as HTML, no framing by other sites."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}

Answer = Callable[[web.Request], Awaitable[web.Response]]


def playground(folder: Traversable) -> Mapping[str, Answer]:
    """Load the files once and return their handlers by route; unknown file types are skipped."""
    answers = {}
    for name, data in _read(folder):
        kind = KINDS.get(PurePath(name).suffix)
        if kind is not None:
            path = "/" if name == "index.html" else FOLDER + name
            answers[path] = _answering(data, kind)
    return answers


def _read(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield all files below a folder with their relative paths."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.read_bytes()


def _answering(data: bytes, kind: str) -> Answer:
    """Return a handler that serves a file with an ETag."""
    etag = hashlib.sha256(data).hexdigest()[:32]

    async def answer(request: web.Request) -> web.Response:
        is_cached = request.if_none_match and any(tag.value == etag for tag in request.if_none_match)
        if is_cached:
            response = web.Response(status=304, headers=HEADERS)
        else:
            response = web.Response(body=data, content_type=kind, charset="utf-8", headers=HEADERS)
        response.etag = etag
        return response

    return answer
