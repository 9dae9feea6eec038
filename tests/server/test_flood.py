"""Bodies that are cheap to send: memory is bounded and others are served, on any path."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from tests.selection import EXHAUSTIVE
from tests.server.flood import BOMB, UNPACKED, bomb, flooded, head, resident_mb, settled_mb
from tests.server.live import Live

PLAIN = ("--draft", "none", "--api-key", "alice", "--api-key", "bob")
GREEDY = "tests.server.greedy"
GROWS_MB = 200.0
LARGE = {"prompt": "x", "max_tokens": 1, "user": "y" * 1_000_000}
"""A request that others send meanwhile."""


@dataclass
class Grown:
    """The effects of a flood."""

    grown_mb: float
    health: int
    other: int
    """Status of another caller's request."""


async def flood_with(live: Live, sent: bytes, count: int) -> Grown:
    before_mb = resident_mb(live.process.pid)
    async with flooded(live.url, sent, count):
        grown_mb = await settled_mb(live.process.pid) - before_mb
        health = (await asyncio.to_thread(live.ask, "/health")).status
        answer = await asyncio.to_thread(live.ask, "/v1/completions", LARGE, Authorization="Bearer bob")
    return Grown(grown_mb, health, answer.status)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live(*PLAIN) as own:
        yield own
        assert "Traceback" not in own.stop()[1]


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("path", "key"),
    [("/health", ""), ("/v1/completions", ""), ("/v1/completions", "alice"), ("/none", "alice")],
)
def test_packed_bodies_take_no_memory_before_they_are_whole(live: Live, path: str, key: str) -> None:
    found = asyncio.run(flood_with(live, bomb(path, key), 100))
    assert found.grown_mb < GROWS_MB / 4 and (found.health, found.other) == (200, 200)


def test_endless_bodies_use_only_their_callers_share_of_memory(live: Live) -> None:
    sent = head("/v1/completions", UNPACKED, "alice") + b" " * (UNPACKED - 1)
    found = asyncio.run(flood_with(live, sent, 30))
    assert found.grown_mb < GROWS_MB and (found.health, found.other) == (200, 200)


def test_whole_bodies_that_are_refused_leave_their_memory_at_once(live: Live) -> None:
    found = asyncio.run(flood_with(live, bomb("/v1/completions", "alice") + BOMB[-1:], 60))
    assert found.grown_mb < GROWS_MB and (found.health, found.other) == (200, 200)


def test_a_body_that_is_only_announced_reserves_nothing(live: Live) -> None:
    found = asyncio.run(flood_with(live, head("/v1/completions", 16 << 20, "alice"), 64))
    assert found.grown_mb < GROWS_MB / 4 and (found.health, found.other) == (200, 200)


@EXHAUSTIVE
def test_an_edge_that_reads_first_is_noticed() -> None:
    """Control: the same attack, on fewer connections, against a server without these limits."""
    with Live(*PLAIN, entry=GREEDY) as greedy:
        assert asyncio.run(flood_with(greedy, bomb("/health"), 16)).grown_mb > GROWS_MB


def test_unread_answers_that_need_no_key_hold_no_connection() -> None:
    """They counted as requests in progress, and so blocked other clients for `stall_timeout`."""
    request = b"GET /web/vendor/marked.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with Live(*PLAIN, "--max-connections", "4") as live, contextlib.ExitStack() as opened:
        for _ in range(4):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", urlsplit(live.url).port))
            client.sendall(request * 16)
        time.sleep(1.0)
        assert [live.ask("/health").status for _ in range(3)] == [200] * 3
