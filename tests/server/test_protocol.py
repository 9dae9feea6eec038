"""What becomes of a connection whose request was refused before its body was read to the end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.web_protocol import RequestHandler

from specdec.server.protocol import Connection


@pytest.mark.parametrize(
    ("encoding", "is_read", "is_closed"), [("gzip", False, True), ("gzip", True, False), ("", False, False)]
)
def test_the_rest_of_a_packed_body_is_not_unpacked(
    encoding: str, is_read: bool, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []

    async def finish(*_: object) -> tuple[None, bool]:
        return None, False

    monkeypatch.setattr(RequestHandler, "finish_response", finish)
    monkeypatch.setattr(RequestHandler, "force_close", lambda *own: closed.append(own))
    content = SimpleNamespace(is_eof=lambda: is_read)
    request: Any = SimpleNamespace(headers={"Content-Encoding": encoding}, content=content)
    own: Any = Connection.__new__(Connection)
    asyncio.run(Connection.finish_response(own, request, SimpleNamespace(), None))  # type: ignore[arg-type]
    assert bool(closed) == is_closed
