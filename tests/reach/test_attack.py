"""A side channel under attack: no client gets another prompt's blocks, and no memory use grows."""

import asyncio
import contextlib
import gzip
import json
import random
import string
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdec.reach import channel, connections
from specdec.reach.messages import MOST_BEATS
from specdec.reach.protocol import STATUSES, PrefixIdentity, Secret
from specdec.reach.signed import SignedRequest
from tests.reach.peers import PROMPT, SECRET, Lender, readable, run, until

HOST = "Host: p\r\nConnection: close\r\n"
ROUTES = (
    ("GET", "/reach/agents"),
    ("POST", f"/reach/leases/{'0' * 32}/open"),
    ("POST", f"/reach/leases/{'0' * 32}/sums"),
    ("POST", f"/reach/leases/{'0' * 32}/close"),
    ("POST", "/reach/rooms/5"),
    ("POST", "/reach/beat"),
    ("GET", "/reach/kept"),
)


def sign(method: str, path: str, body: bytes = b"") -> tuple[SignedRequest, str]:
    """Return a new request, and the header line with its signature."""
    signed = SignedRequest.new(method, path, body)
    return signed, f"Authorization: {signed.authorization(Secret(SECRET))}\r\n"


def parse(signed: SignedRequest, answer: bytes, *, encrypted: bool = True) -> tuple[int, Any]:
    """Return the status and the JSON of a raw response to a request."""
    top, _, data = answer.partition(b"\r\n\r\n")
    status = int(top.split()[1])
    return status, readable(signed, status, data, encrypted=encrypted)


@contextlib.asynccontextmanager
async def connected(lender: Lender) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", lender.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def send(lender: Lender, data: bytes) -> bytes:
    """Send bytes, and read until the server closes."""
    async with connected(lender) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        return await read_until_closed(reader)


async def read_until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received until the server closes; fail if it does not.

    A server that closes while its client still sends resets the connection; the bytes before that count.
    """
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(1 << 16), 20):
            answer += part
    return answer


def check_error(status: int, answer: Any) -> str:
    """Check the error's format; return its reason."""
    assert set(answer) == {"error"} and set(answer["error"]) == {"code", "message", "param"}, answer
    code, message = answer["error"]["code"], answer["error"]["message"]
    assert (code in STATUSES and 400 <= status < 500) or code in ("prefill_failed", "busy"), answer
    assert 10 < len(message) < 500 and SECRET not in message
    return code


@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES, ("GET", "/"), ("DELETE", "/x"), ("POST", "/reach/agents")]
)
def test_without_a_valid_signature_nothing_is_served(method: str, path: str) -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            request, own = SignedRequest.new(method, path, b'{"a": 1}'), Secret(SECRET)
            values = (
                "",
                f"Bearer {SECRET}",
                request.authorization(Secret(SECRET + "x")),
                request.authorization(own)[:-1],
                request.authorization(own).upper(),
                request._replace(method="PUT").authorization(own),
                request._replace(path=f"{path}?").authorization(own),
            )
            for header in ({}, {"x-api-key": SECRET}, *({"Authorization": value} for value in values)):
                status, answer = await lender.call(method, path, {"a": 1}, headers=header)
                assert (status, check_error(status, answer)) == (401, "unauthorized")
            assert set(lender.book.figures.refused) == {"unauthorized"}

    run(test())


def test_two_headers_of_which_one_is_right_are_refused() -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            for pair in ("{}Authorization: x\r\n", "Authorization: x\r\n{}"):
                signed, line = sign("GET", "/reach/agents")
                lines = pair.format(line)
                answer = await send(lender, f"GET /reach/agents HTTP/1.1\r\n{HOST}{lines}\r\n".encode())
                assert parse(signed, answer, encrypted=False)[0] == 401
            signed, line = sign("GET", "/reach/agents")
            answer = await send(lender, f"GET /reach/agents HTTP/1.1\r\n{HOST}{line}\r\n".encode())
            assert parse(signed, answer)[0] == 200, "the control"

    run(test())


def odd_body(draw: random.Random, good: dict[str, Any], depth: int = 0) -> Any:
    """Return a random body, some close to a valid one."""
    odd = [
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        -(2**70),
        0.5,
        1e300,
        "",
        "x",
        "0" * 32,
        "f" * 64,
        "\0",
        "ü" * 32,
        [],
        {},
    ]
    if draw.random() < 0.1 and depth < 3:
        return [odd_body(draw, good, depth + 1) for _ in range(draw.randrange(4))]
    body = dict(good)
    for _ in range(draw.randrange(1, 4)):
        name = draw.choice([*good, "more", "__class__", "ü"])
        if draw.random() < 0.3:
            body.pop(name, None)
        else:
            body[name] = draw.choice([*odd, [draw.choice(odd)] * draw.randrange(3)])
    return body


@pytest.mark.parametrize("rounds", [400])
def test_random_bodies_get_errors_that_name_the_field_and_never_blocks(rounds: int) -> None:
    async def test() -> None:
        draw = random.Random(7)
        async with Lender(wait_s=0.001).listening() as lender:
            lease, loan = await lender.read(room=5)
            good_ask = lender.ask(hash="e" * 64)
            close = {"engine": "1" * 32, "reader": "a" * 32, "read": True}
            beat = {"engine": lender.engine, "leases": ["1" * 32]}
            routes = [
                (f"/reach/leases/{lease.id}/open", good_ask),
                (
                    f"/reach/leases/{lease.id}/sums",
                    {"engine": lender.engine, "reader": "b" * 32, "indices": [0]},
                ),
                (f"/reach/leases/{lease.id}/close", close),
                ("/reach/rooms/5", good_ask),
                ("/reach/rooms/6", good_ask),
                ("/reach/beat", beat),
            ]
            async with connected(lender) as (reader, writer):
                for number in range(rounds * len(routes)):
                    path, good = routes[number % len(routes)]
                    if draw.random() < 0.2:
                        data = bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
                    else:
                        data = json.dumps(odd_body(draw, good)).encode()
                        if draw.random() < 0.1:
                            data = data[: draw.randrange(len(data))]
                    signed, line = sign("POST", path, data)
                    head = f"POST {path} HTTP/1.1\r\nHost: p\r\n{line}Content-Length: {len(data)}"
                    writer.write(f"{head}\r\n\r\n".encode() + data)
                    top = (await reader.readuntil(b"\r\n\r\n")).decode()
                    size = int(top.lower().partition("content-length: ")[2].split()[0])
                    status, answer = parse(signed, top.encode() + await reader.readexactly(size))
                    if status == 200:
                        assert path == "/reach/beat" and set(answer) == {"leases"} and not answer["leases"]
                    else:
                        check_error(status, answer)
            assert lease.reader is None and not lease.end_reason and not loan.given_back
            assert lender.book.figures.held == 1 and not lender.book.rooms._waiting
            assert "internal" not in lender.book.figures.refused

    run(test(), 300)


@pytest.mark.parametrize(
    "path",
    [
        f"/reach/leases/{'A' * 32}/open",
        f"/reach/leases/{'0' * 31}/open",
        f"/reach/leases/{'0' * 33}/open",
        f"/reach/leases/{'0' * 32}%0a/open",
        f"/reach/leases/{'0' * 32}%00/open",
        "/reach/leases/%2e%2e/open",
        "/reach/leases/../../etc/passwd/open",
        "/reach/leases//open",
        "/reach/leases/" + "%D9%A1" * 32 + "/open",
        "/reach/rooms/-1",
        "/reach/rooms/+1",
        "/reach/rooms/1e3",
        "/reach/rooms/0x10",
        "/reach/rooms/1_0",
        "/reach/rooms/%D9%A1",
        "/reach/rooms/%F0%9F%98%80",
        "/reach/rooms/1%0a",
        f"/reach/rooms/{1 << 63}",
        "/reach/rooms/" + "9" * 5000,
        "/reach/rooms/5/",
        "/reach/rooms/",
        "//reach/rooms/5",
        "/reach/beat/x",
        "/REACH/beat",
    ],
)
def test_odd_paths_are_no_leases_and_no_rooms(path: str) -> None:
    async def test() -> None:
        async with Lender(wait_s=0.01).listening() as lender:
            await lender.read(room=5)
            body = json.dumps(lender.ask()).encode()
            signed, line = sign("POST", path, body)
            head = f"POST {path} HTTP/1.1\r\n{HOST}{line}Content-Length: {len(body)}\r\n\r\n"
            answer = await send(lender, head.encode() + body)
            assert check_error(*parse(signed, answer)) in ("malformed", "no_route")

    run(test())


@pytest.mark.parametrize("since", ["-1", "x", "1&since=2&more=1", "%D9%A1", "", "1.0", "9" * 30])
def test_an_odd_since_is_refused(since: str) -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            status, answer = await lender.call("GET", f"/reach/kept?since={since}")
            assert (status, answer["error"]["param"]) == (400, "since")
            status, answer = await lender.call("GET", "/reach/kept")
            assert status == 200 and answer["whole"] and answer["epoch"] == lender.engine

    run(test())


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_giant_body_is_not_read(is_chunked: bool) -> None:
    async def test() -> None:
        async with Lender().listening() as lender, connected(lender) as (reader, writer):
            framing = "Transfer-Encoding: chunked" if is_chunked else "Content-Length: 10000000000"
            _, line = sign("POST", "/reach/beat")
            writer.write(f"POST /reach/beat HTTP/1.1\r\n{HOST}{line}{framing}\r\n\r\n".encode())
            sent, part = 0, b"x" * 65536
            with contextlib.suppress(ConnectionError):
                while sent < 1 << 26:
                    writer.write(b"10000\r\n" + part + b"\r\n" if is_chunked else part)
                    await asyncio.wait_for(writer.drain(), 5)
                    sent += len(part)
                    if reader.at_eof():
                        break
            assert sent < 1 << 26, "it did not read on"
            assert lender.book.figures.refused == {"too_large": 1}

    run(test(), 60)


def test_a_heartbeat_of_the_maximum_number_of_leases_is_accepted() -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            beat = {"engine": lender.engine, "leases": ["1" * 32] * MOST_BEATS}
            assert await lender.call("POST", "/reach/beat", beat) == (200, {"leases": []})

    run(test())


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 2\r\nContent-Length: 90\r\n",
        "Content-Length: +2\r\n",
        "Content-Length: 2, 2\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Content-Length : 2\r\n",
        "X: a\r\n b\r\nContent-Length: 2\r\n",
        "X: a\0b\r\nContent-Length: 2\r\n",
        f"X: {'a' * 20_000}\r\nContent-Length: 2\r\n",
        "X: y\r\n" * 500 + "Content-Length: 2\r\n",
    ],
)
def test_a_request_within_another_is_not_executed(head: str) -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            lease, loan = await lender.read()
            body = json.dumps({"engine": lender.engine, "reader": "a" * 32, "read": False})
            path = f"/reach/leases/{lease.id}/close"
            inner = f"POST {path} HTTP/1.1\r\n{HOST}{sign('POST', path, body.encode())[1]}"
            inner += f"Content-Length: {len(body)}\r\n\r\n{body}"
            signed, line = sign("POST", "/reach/beat")
            outer = f"POST /reach/beat HTTP/1.1\r\n{HOST}{head}{line}\r\n0\r\n\r\n{inner}"
            answer = await send(lender, outer.encode())
            assert answer[5:].startswith((b"1.0 4", b"1.1 4")) and answer.count(b"HTTP/1.") == 1
            assert b"aiohttp" not in answer
            check_error(*parse(signed, answer, encrypted=False))
            assert not lease.end_reason and not loan.given_back

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01",
        b"SSH-2.0-x\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
def test_invalid_http_is_answered_without_echo_and_not_logged(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            answer = await send(lender, data)
            top, _, rest = answer.partition(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 40") or top.startswith(b"HTTP/1.0 40"), answer
            check_error(400, json.loads(rest))

    run(test())
    assert not [record for record in caplog.records if record.name.startswith(("aiohttp", "specdec"))]


def test_slow_headers_and_bodies_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dribble(writer: asyncio.StreamWriter, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.05)

    async def test() -> None:
        async with Lender().listening() as lender:
            signed, line = sign("POST", "/reach/beat", b" " * 1000)
            head = f"POST /reach/beat HTTP/1.1\r\n{HOST}{line}Content-Length: 1000\r\n"
            async with connected(lender) as (reader, writer):
                dribbling = asyncio.create_task(dribble(writer, head.encode() * 3))
                assert await read_until_closed(reader) == b""
                dribbling.cancel()
            async with connected(lender) as (reader, writer):
                writer.write(f"{head}\r\n".encode())
                dribbling = asyncio.create_task(dribble(writer, b" " * 1000))
                answer = await read_until_closed(reader)
                assert check_error(*parse(signed, answer)) == "slow_body"
                dribbling.cancel()

    monkeypatch.setattr(connections, "IDLE_S", 0.3)
    monkeypatch.setattr(channel, "BODY_S", 0.3)
    run(test())


def test_unread_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        lender = Lender()
        lender.kept = {(prefix, 1) for prefix in range(100_000)}
        async with lender.listening(), connected(lender) as (_, writer):
            writer.transport.pause_reading()

            def request() -> bytes:
                _, line = sign("GET", "/reach/kept")
                return f"GET /reach/kept HTTP/1.1\r\nHost: p\r\n{line}\r\n".encode()

            server = lender.channel._runner.server
            with contextlib.suppress(ConnectionError):
                while server.connections or not server.requests_count:
                    writer.write(b"".join(request() for _ in range(10)))
                    await writer.drain()
                    await asyncio.sleep(0.02)
            assert not server.connections, "it hung up"

    monkeypatch.setattr(channel, "SEND_S", 0.2)
    run(test(), 60)


def test_idle_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with Lender().listening() as lender, contextlib.AsyncExitStack() as stack:
            for _ in range(20):
                await stack.enter_async_context(connected(lender))
            status, _ = await lender.call("GET", "/reach/agents")
            assert status == 200
            assert len(lender.channel._runner.server.connections) <= 5

    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 5)
    run(test())


def test_packed_bodies_are_not_unpacked_and_nothing_is_expected() -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            packed = gzip.compress(b" " * 100_000_000)
            signed, line = sign("POST", "/reach/beat", packed)
            head = f"POST /reach/beat HTTP/1.1\r\n{HOST}{line}Content-Length: {len(packed)}\r\n"
            answer = await send(lender, f"{head}Content-Encoding: gzip\r\n\r\n".encode() + packed)
            status, error = parse(signed, answer)
            assert (status, error["error"]["param"]) == (400, "Content-Encoding")
            _, line = sign("POST", "/reach/beat", b"12345")
            head = f"POST /reach/beat HTTP/1.1\r\n{HOST}{line}Content-Length: 5\r\n"
            answer = await send(lender, f"{head}Expect: 100-continue\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 417")
            check_error(417, json.loads(answer.partition(b"\r\n\r\n")[2]))

    run(test())


def test_a_reader_that_hangs_up_while_it_waits_leaves_nothing_waiting() -> None:
    async def test() -> None:
        async with Lender(wait_s=30).listening() as lender:
            body = json.dumps(lender.ask())
            _, line = sign("POST", "/reach/rooms/77", body.encode())
            head = f"POST /reach/rooms/77 HTTP/1.1\r\n{HOST}{line}Content-Length: {len(body)}\r\n\r\n"
            async with connected(lender) as (_, writer):
                writer.write((head + body).encode())
                await until(lambda: lender.book.figures.rooms_waiting)
            await until(lambda: not lender.book.figures.rooms_waiting)
            assert not lender.book.rooms._waiting

    run(test())


def test_ids_are_not_to_be_guessed_from_others() -> None:
    async def test() -> None:
        lender = Lender(most_leases=300)
        ids = [lender.lend(num_bytes=0)[0].id for _ in range(300)]
        assert len(set(ids)) == 300 and all(set(own) <= set(string.hexdigits.lower()) for own in ids)
        assert all(len({own[place] for own in ids}) > 8 for place in range(32))
        lender.book.end_all()

    run(test())


def test_readers_see_only_blocks_of_their_own_prompt() -> None:
    """Concurrent readers of many prompts each see only their own blocks."""

    async def test() -> None:
        async with Lender(most_leases=64).listening() as lender:
            prompts = [PrefixIdentity.of([own, *range(9)]) for own in range(40)]
            leases = []
            for place, prompt in enumerate(prompts):
                lease, loan = lender.lend(prompt, room=place)
                loan.read(10, first=1000 * place)
                leases.append(lease)

            async def read(place: int, other: int) -> None:
                path = f"/reach/leases/{leases[place].id}/open" if place % 2 else f"/reach/rooms/{place}"
                ask = lender.ask(prompts[other], reader=f"{place:032x}")
                status, answer = await lender.call("POST", path, ask)
                if other == place:
                    assert status == 200 and answer["blocks"][0] == 1000 * place
                else:
                    assert (status, check_error(status, answer)) == (409, "other_prompt")

            draw = random.Random(3)
            await asyncio.gather(
                *(read(place, draw.choice([place, (place + 1) % 40])) for place in range(40))
            )
            assert PROMPT not in prompts

    run(test(), 60)
