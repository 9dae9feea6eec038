"""Requests and responses pass through the router unchanged."""

import asyncio
import gzip
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from yarl import URL

from specdec.route import state
from tests.route.rig import Fake, Rig, Seen, never, ok, refusing, rig, streaming, until

BODY = (
    b'{"max_tokens":  1.0e+01, "unknown": {"b": 1, "a": 12345678901234567890}, "prompt": "h\\u00e9 \xc3\xa9"}'
)


def run(scenario: Callable[[Rig, Fake], Awaitable[None]], fake: Fake | None = None, **settings: Any) -> None:
    """Play a scenario with one replica."""
    own = fake or Fake()

    async def play() -> None:
        async with rig(own, **settings) as found:
            await scenario(found, own)

    asyncio.run(play())


async def raw(own: Rig, sent: bytes, *, until: bytes | None = None) -> bytes:
    """Send bytes over a new connection; read up to `until`, or until it closes."""
    url = urlsplit(own.router.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(sent)
        return await (reader.readuntil(until) if until else reader.read())
    finally:
        writer.close()
        await writer.wait_closed()


def test_bodies_and_headers_go_on_byte_for_byte() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        sent = {
            "Authorization": "Bearer secret",
            "X-Request-ID": "mine-1",
            "Content-Type": "application/json; charset=x",
            "x-api-key": "k",
            "Accept-Encoding": "br",
            "traceparent": "00-1-2-03",
            "Origin": "http://page.example",
        }
        url = URL(f"{own.router.url}/v1/completions?a=%2F&b=%20+c", encoded=True)
        async with own.client.post(url, data=BODY, headers=sent) as answer:
            assert answer.status == 200 and await answer.read() == b'{"ok": true}'
        seen = fake.seen[-1]
        assert seen.body == BODY and seen.method == "POST" and seen.path == "/v1/completions?a=%2F&b=%20+c"
        assert {name: seen.headers[name] for name in sent} == sent
        assert seen.headers["Host"] == urlsplit(own.router.url).netloc, "replicas judge it, and Origin by it"
        assert seen.headers["Content-Length"] == str(len(BODY))

    run(scenario)


def test_headers_of_the_connection_end_here() -> None:
    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.Response(text="x", headers={"Connection": "x-hop", "X-Hop": "1", "X-End": "2"})
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Set-Cookie", "b=2")
        response.headers["Keep-Alive"] = "timeout=5"
        return response

    async def scenario(own: Rig, fake: Fake) -> None:
        hop = {
            "TE": "trailers",
            "Proxy-Authorization": "Basic x",
            "Upgrade": "h2c",
            "Connection": "upgrade, x-own",
        }
        async with own.client.get("/x", headers={**hop, "X-Own": "1", "X-Other": "2"}) as got:
            assert got.headers.getall("Set-Cookie") == ["a=1", "b=2"] and got.headers["X-End"] == "2"
            assert not {"X-Hop", "Keep-Alive"} & got.headers.keys()
        seen = fake.seen[-1].headers
        assert seen["X-Other"] == "2"
        assert not {"TE", "Proxy-Authorization", "Upgrade", "X-Own"} & seen.keys()

    run(scenario, Fake(answer))


def test_a_request_without_an_id_gets_one_on_both_sides() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        async with own.client.post("/v1/completions", json={}) as got:
            assert got.headers["X-Request-ID"] == fake.seen[-1].headers["X-Request-ID"] != ""
        for name in ("User-Agent", "Accept", "Content-Type", "Accept-Encoding"):
            assert name not in (await bare(own, fake)).headers

    async def bare(own: Rig, fake: Fake) -> Seen:
        await raw(own, b"GET /v1/x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        return fake.seen[-1]

    run(scenario)


def test_head_and_options_have_their_answers() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        got = await raw(own, b"HEAD /v1/thing HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        head, _, rest = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"Content-Length: 12" in head and not rest
        async with own.client.options("/v1/completions", headers={"Origin": "http://a.example"}) as answer:
            assert answer.status == 200 and fake.seen[-1].method == "OPTIONS"
        for path in ("/health", "/ready", "/metrics"):
            async with own.client.head(path) as answer:
                assert answer.status == 200
        assert len(fake.seen) == 2

    run(scenario)


def test_foreign_pages_do_not_read_the_figures_of_a_router() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        for headers, expected in (({}, 200), ({"Host": "rebound.example"}, 403), ({"Origin": "null"}, 403)):
            async with own.client.get("/metrics", headers=headers) as answer:
                assert answer.status == expected
            async with own.client.post("/v1/completions", json={}, headers=headers) as answer:
                assert answer.status == 200 and fake.seen, "replicas judge what goes on to them"

    run(scenario)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b"GET http://127.0.0.1:1/v1/x?y=1 HTTP/1.1", "/v1/x?y=1"),
        (b"GET //127.0.0.1:1/x HTTP/1.1", "//127.0.0.1:1/x"),
        (b"GET /%2e%2e/../x#y HTTP/1.1", None),
        (b"GET @127.0.0.1:1/ HTTP/1.1", None),
        (b"GET .example:1/ HTTP/1.1", None),
        (b"GET ?x HTTP/1.1", None),
        (b"OPTIONS * HTTP/1.1", None),
        (b"CONNECT 127.0.0.1:1 HTTP/1.1", None),
        (b"TRACE / HTTP/1.1", None),
    ],
)
def test_no_first_line_leads_elsewhere(line: bytes, path: str | None) -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        got = await raw(own, line + b"\r\nHost: h\r\nConnection: close\r\n\r\n")
        status = int(got.split()[1])
        if path:
            assert status == 200 and fake.seen[-1].path == path
        else:
            assert status in (200, 400, 404, 405) and len(fake.seen) == (status == 200)
            assert all(seen.path.startswith("/") for seen in fake.seen)

    run(scenario)


def test_a_client_that_waits_for_100_continue_gets_it_here() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(
            BODY
        )
        url = urlsplit(own.router.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert not fake.seen
        writer.write(BODY)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert fake.seen[-1].body == BODY and "Expect" not in fake.seen[-1].headers
        writer.close()
        await writer.wait_closed()

    run(scenario)


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2000\r\n\r\n"
        assert (await raw(own, head, until=b"\r\n")).startswith(b"HTTP/1.1 413")
        chunked = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"400\r\n" + b"x" * 1024 + b"\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n"
        assert (await raw(own, chunked, until=b"\r\n")).startswith(b"HTTP/1.1 413")
        status, found = await own.post({"prompt": "x" * 2000})
        assert status == 413 and "max_body_bytes" in found["error"]["message"]
        assert not fake.seen

    run(scenario, max_body_bytes=1024)


def test_a_packed_body_goes_on_unpacked_and_bounded() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        packed = {"Content-Encoding": "gzip"}
        async with own.client.post("/v1/x", data=gzip.compress(BODY), headers=packed) as answer:
            assert answer.status == 200
        assert fake.seen[-1].body == BODY and "Content-Encoding" not in fake.seen[-1].headers
        async with own.client.post("/v1/x", data=gzip.compress(b"x" * 4096), headers=packed) as answer:
            assert answer.status == 413
        assert len(fake.seen) == 1

    run(scenario, max_body_bytes=1024)


def test_a_body_of_megabytes_goes_on_whole() -> None:
    body = json.dumps({"prompt": "é" * (1 << 20), "stream": False}).encode()

    async def scenario(own: Rig, fake: Fake) -> None:
        async with own.client.post("/v1/completions", data=io.BytesIO(body)) as answer:
            assert answer.status == 200
        assert fake.seen[-1].body == body

    run(scenario)


def test_a_packed_answer_stays_packed() -> None:
    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"hello"), headers={"Content-Encoding": "gzip"})

    async def scenario(own: Rig, fake: Fake) -> None:
        got = await raw(own, b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        head, _, rest = got.partition(b"\r\n\r\n")
        assert b"Content-Encoding: gzip" in head and gzip.decompress(rest) == b"hello"

    run(scenario, Fake(answer))


def test_a_stream_comes_piece_by_piece() -> None:
    events = [b"data: %d\n\n" % i for i in range(20)]
    gate = asyncio.Event()

    async def wait(request: web.Request, seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return web.Response()

    async def scenario(own: Rig, fake: Fake) -> None:
        async with own.client.post("/v1/completions", json={"stream": True}) as answer:
            got = b""
            while len(got) < sum(map(len, events)):
                got += await answer.content.readany()
            assert got == b"".join(events), "all is here though the answer has not ended"
            gate.set()
            assert await answer.read() == b""

    run(scenario, Fake(streaming(*events, then=wait)))


def test_old_clients_read_streams_to_the_end_of_the_connection() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        got = await raw(own, b"GET /x HTTP/1.0\r\n\r\n")
        head, _, rest = got.partition(b"\r\n\r\n")
        assert rest == b"onetwo" and b"chunked" not in head.lower()

    run(scenario, Fake(streaming(b"one", b"two")))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 500, 504])
def test_an_error_is_the_clients_and_asked_of_nobody_else(status: int) -> None:
    async def play() -> None:
        fakes = [Fake(refusing(status)) for _ in range(3)]
        async with rig(*fakes) as own:
            got, body = await own.post({"prompt": "x"})
            assert got == status and body == {"error": {"message": f"refused with {status}"}}
            assert sum(len(fake.seen) for fake in fakes) == 1

    asyncio.run(play())


def test_a_slow_client_holds_up_the_replica_and_not_the_routers_memory() -> None:
    piece, sent = b"x" * 65536, [0]

    async def pour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2000):  # 125 MiB
            await response.write(piece)
            sent[0] += len(piece)
        return response

    async def scenario(own: Rig, fake: Fake) -> None:
        url = urlsplit(own.router.url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect((url.hostname, url.port))
        sock.sendall(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        before = -1
        while before != sent[0] or not sent[0]:  # until the transfer stalls
            before = sent[0]
            await asyncio.sleep(0.3)
        assert sent[0] < 24 << 20, "what the two connections' buffers hold, and no more"
        sock.close()

    run(scenario, Fake(pour))


def test_a_client_that_never_reads_is_given_up() -> None:
    async def pour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except (ConnectionError, asyncio.CancelledError):
            seen.left.set()
            raise

    async def scenario(own: Rig, fake: Fake) -> None:
        url = urlsplit(own.router.url)
        with socket.create_connection((url.hostname, url.port)) as sock:
            sock.sendall(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
            while not fake.seen:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(20):
                await fake.seen[-1].left.wait()

    run(scenario, Fake(pour), stall_timeout=0.3)


def test_models_of_all_replicas_are_one_list() -> None:
    def cards(*names: str) -> Fake:
        async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
            if seen.headers.get("Authorization") != "Bearer k":
                return web.json_response({"error": {"message": "a key is wanted"}}, status=401)
            return web.json_response(
                {"object": "list", "data": [{"id": name, "of": names[0]} for name in names]}
            )

        return Fake(answer, models=names)

    async def deep(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=b"[" * 100_000, status=200 if "Authorization" in seen.headers else 401)

    async def play() -> None:
        fakes = [cards("a", "b"), cards("b", "c"), Fake(refusing(500)), Fake(deep)]
        async with rig(*fakes) as own:
            async with own.client.get("/v1/models", headers={"Authorization": "Bearer k"}) as answer:
                found = await answer.json()
            assert [(card["id"], card["of"]) for card in found["data"]] == [
                ("a", "a"),
                ("b", "a"),
                ("c", "b"),
            ]
            assert (found["first_id"], found["last_id"]) == ("a", "c")
            async with own.client.get("/v1/models") as answer:
                assert answer.status == 401
            for name in ("c", "a", "c"):
                await own.post({"model": name, "prompt": "x"})
            assert [len([s for s in fake.seen if s.method == "POST"]) for fake in fakes] == [1, 2, 0, 0]

    asyncio.run(play())


def test_all_replicas_flush() -> None:
    async def play() -> None:
        fakes = [Fake(), Fake(), Fake()]
        async with rig(*fakes) as own:
            assert (await own.post({}, "/flush_cache"))[0] == 200
            assert [len(fake.seen) for fake in fakes] == [1, 1, 1]
            fakes[1].answer = refusing(401)
            assert (await own.post({}, "/flush_cache"))[0] == 401

    asyncio.run(play())


def test_a_stored_response_is_asked_of_the_replica_that_has_it() -> None:
    def storing(name: str) -> Fake:
        async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
            return web.json_response({"id": f"resp_{name}", "path": seen.path})

        return Fake(answer)

    async def play() -> None:
        fakes = {name: storing(name) for name in "abc"}
        async with rig(*fakes.values()) as own:
            _, made = await own.post({"input": "x"}, "/v1/responses")
            owner = fakes[made["id"].removeprefix("resp_")]
            own.prefer(next(fake for fake in fakes.values() if fake is not owner))
            for _ in range(6):
                async with own.client.get(f"/v1/responses/{made['id']}") as answer:
                    assert (await answer.json())["id"] == made["id"]
                await own.post({"input": "y", "previous_response_id": made["id"]}, "/v1/responses")
            assert len(owner.seen) == 13 and sum(len(fake.seen) for fake in fakes.values()) == 13

    asyncio.run(play())


def test_large_bodies_are_refused_where_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "KEPT_BYTES", 1_100_000)

    async def scenario(own: Rig, fake: Fake) -> None:
        kept = own.router.state.kept
        async with asyncio.TaskGroup() as group:
            large = json.dumps({"prompt": "x" * 200_000}).encode()
            asking = [group.create_task(own.client.post("/v1/completions", data=large)) for _ in range(2)]
            await until(lambda: len(fake.seen) == 2)
            async with own.client.post("/v1/completions", data=large) as answer:
                assert answer.status == 429 and (await answer.json())["error"]["code"] == "too_many_requests"
            small = asyncio.create_task(own.post({"prompt": "y" * 60_000}))
            await until(lambda: len(fake.seen) == 3)
            for task in asking:
                task.cancel()
            await until(lambda: fake.seen[0].left.is_set() and fake.seen[1].left.is_set())
            small.cancel()
        await until(lambda: not kept.held_bytes)
        fake.answer = ok
        async with own.client.post("/v1/completions", data=iter_of(large)) as answer:
            assert answer.status == 200
        assert not kept.held_bytes

    async def iter_of(data: bytes) -> AsyncIterator[bytes]:
        yield data  # so that its length is not known beforehand

    run(scenario, Fake(never), max_body_bytes=250_000)


def test_refusals_say_nothing_of_how_fast_a_replica_reads() -> None:
    async def scenario(own: Rig, fake: Fake) -> None:
        for fake.answer, count in ((refusing(401), 0), (refusing(400), 0), (streaming(b"data: 1\n\n"), 1)):
            async with own.client.post("/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                await answer.read()
            assert round(own.replicas[0].measured.sums(time.monotonic())[0]) == count
        assert await own.figure("specdec:route_first_byte_seconds_count") == 1

    run(scenario)
