"""`specdec` with middleware that unpacks every body before any check, without limits.

`python -m tests.server.greedy serve …`: the control for the attacks of `flood`.
"""

import sys
import zlib
from collections.abc import Awaitable, Callable

from aiohttp import web

from specdec.cli import main
from specdec.route import app as route_app
from specdec.server import app as server_app
from specdec.server import run


async def read_first(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unpack a body as it arrives, for any sender and path."""
    unpacker, body = zlib.decompressobj(16 + zlib.MAX_WBITS), bytearray()
    async for data in request.content.iter_any():
        body += unpacker.decompress(data)
    return await handler(request)


def spoil() -> None:
    """Install it before a server's and a router's handlers."""
    for module in (server_app, route_app):
        right = module.build_app

        def build(state, right=right):  # type: ignore[no-untyped-def]
            app = right(state)
            app.middlewares.insert(0, web.middleware(read_first))
            return app

        module.build_app = build
    run.build_app = server_app.build_app  # type: ignore[attr-defined]


if __name__ == "__main__":
    spoil()
    sys.exit(main())
