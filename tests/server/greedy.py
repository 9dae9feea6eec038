"""`specdec` with middleware that unpacks every body before any check, without limits.

`python -m tests.server.greedy serve …`: the control for the attacks of `flood`.
"""

import sys
import zlib
from collections.abc import Awaitable, Callable

from aiohttp import web

from specdec.cli import main
from specdec.server import app, run
from specdec.server.state import ServerState


async def read_first(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unpack a body as it arrives, for any sender and path."""
    unpacker, body = zlib.decompressobj(16 + zlib.MAX_WBITS), bytearray()
    async for data in request.content.iter_any():
        body += unpacker.decompress(data)
    return await handler(request)


def spoil() -> None:
    """Install it before the server's handlers."""
    right = app.build_app

    def build(state: ServerState) -> web.Application:
        made = right(state)
        made.middlewares.insert(0, web.middleware(read_first))
        return made

    run.build_app = build  # type: ignore[attr-defined]


if __name__ == "__main__":
    spoil()
    sys.exit(main())
