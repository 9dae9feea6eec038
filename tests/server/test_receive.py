"""Bodies as handlers read them: whole, unpacked within limits, and counted by caller."""

import asyncio
import gzip
import zlib
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request

from specdec.server.failures import Failure
from specdec.server.receive import ENCODINGS, BodyBudget, HeldBody, ReceivedBody, read_body
from tests.server.live import Live
from tests.server.test_garbage import send

TEXT = b'{"prompt": "x", "max_tokens": 1}'
PACKED = {
    "gzip": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "deflate without a header": zlib.compress(TEXT)[2:-4],
}


def received(data: bytes, encoding: str, most: int = 1000) -> ReceivedBody:
    return ReceivedBody(data, ENCODINGS[encoding.split()[0]], most)


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_unpacked_whole_or_refused(encoding: str) -> None:
    packed = PACKED[encoding]
    assert received(packed, encoding).unpack() == TEXT
    assert received(packed, encoding, len(TEXT)).unpack() == TEXT
    with pytest.raises(web.HTTPRequestEntityTooLarge):
        received(packed, encoding, len(TEXT) - 1).unpack()
    for torn in (packed[:-1], packed[: len(packed) // 2], packed + b"more", b"{}"):
        with pytest.raises(Failure, match="cannot be read"):
            received(torn, encoding).unpack()


def fits(body: HeldBody, size: int) -> bool:
    try:
        body.add(size)
    except Failure:
        return False
    return True


def test_each_new_caller_gets_a_share_of_the_free_budget() -> None:
    budget = BodyBudget(1_000_000, 100_000)
    with ExitStack() as stack:
        taken = {caller: 0 for caller in "abc"}
        for caller in taken:
            while fits(stack.enter_context(budget.holding(caller)), 10_000):
                taken[caller] += 1
        assert taken["a"] in (49, 50) and min(taken.values()) > 10
        assert budget.held_bytes == 10_000 * sum(taken.values()) < 1_000_000
        with pytest.raises(Failure, match="try again later") as refused:
            stack.enter_context(budget.holding("a")).add(10_000)
        assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    assert not budget.held_bytes and not budget._held


def test_large_growing_bodies_are_refused_before_small_ones() -> None:
    budget = BodyBudget(1_000_000, 100_000)
    with ExitStack() as stack:
        bodies = [stack.enter_context(budget.holding("a")) for _ in range(30)]
        while all(fits(body, 1000) for body in bodies):
            pass
        assert fits(stack.enter_context(budget.holding("a")), 100)
        assert fits(stack.enter_context(budget.holding("b")), 100_000)


def test_one_body_always_fits_alone() -> None:
    with BodyBudget(0, 1 << 20).holding("a") as body:
        body.add(1 << 20)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Live("--draft", "none", "--max-body-bytes", "20000", "--body-timeout", "600") as own:
        yield own
        assert "Traceback" not in own.stop()[1]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_server_reads_packed_bodies_within_its_limit(live: Live, encoding: str) -> None:
    packed = {"Content_Encoding": encoding}
    assert live.ask("/v1/completions", data=PACKED[encoding], **packed).status == 200
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    assert live.ask("/v1/completions", data=pack(b" " * 20_001), **packed).status == 413
    assert live.ask("/v1/completions", data=pack(b" " * 19_000), **packed).status == 400


@pytest.mark.parametrize("path", ["/health", "/none", "/v1/models"])
def test_an_unread_body_is_not_waited_for(live: Live, path: str) -> None:
    """It is answered although the body never arrives, whatever its encoding."""
    for encoding in ("gzip", "unknown"):
        request = f"GET {path} HTTP/1.1\r\nHost: a.localhost\r\nContent-Encoding: {encoding}\r\n"
        status, _, _ = send(live, f"{request}Content-Length: 100\r\n\r\nx".encode())
        assert status == (404 if path == "/none" else 200)


def test_a_connection_stays_usable_after_an_unread_body(live: Live) -> None:
    async def play() -> None:
        at = live.url.rpartition("/")[2].split(":")
        _, writer = pair = await asyncio.open_connection(at[0], int(at[1]))
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nabcde")
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = await pair[0].read()
        assert said.count(b"HTTP/1.1 200") == 4 and b'"version"' in said
        writer.close()

    asyncio.run(play())


def test_requests_without_a_body_are_read_again_and_again() -> None:
    """Aiohttp has one reader for all of them."""

    async def read() -> None:
        budget = BodyBudget(1 << 20, 1 << 20)
        for _ in range(3):
            request = make_mocked_request("POST", "/x", payload=EMPTY_PAYLOAD, client_max_size=1 << 20)
            with budget.holding("") as held:
                assert (await read_body(request, held, 5.0)).unpack() == b""

    asyncio.run(read())
