"""The ingress in front of stand-in replicas, without Ray: choice, retries, errors, hang-ups."""

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from specdec.ray import ingress as ingress_module
from specdec.ray.fleet import Asked
from specdec.ray.ingress import Ingress
from specdec.ray.prompts import look_at
from specdec.ray.rates import NONE
from specdec.ray.settings import RayApp, RayConfig
from specdec.server.settings import ServerConfig
from tests.ray.fakes import SOON_S, Fake, Seen, never, ok, refusing, reset, streaming, until

EVENT = b'data: {"n": 1}\n\n'


class Handle:
    """Stands in for Ray's handle: the ingress orders the replicas, and the first is taken."""

    def __init__(self, fakes: Sequence[Fake]) -> None:
        self.urls = {f"r{i}": fake.url for i, fake in enumerate(fakes)}
        self.held = 0

    @contextlib.asynccontextmanager
    async def choose_replica(self, asked: Asked) -> AsyncIterator[Any]:
        if not self.urls:
            await asyncio.sleep(10 * SOON_S)
        reports = {name: (url, {"waiting": 0.0, "arena": 0.0}) for name, url in self.urls.items()}
        name = (await asked.order(reports))[0]
        self.held += 1
        try:
            yield SimpleNamespace(replica_id=name, replica_metadata={"url": self.urls[name]})
        finally:
            self.held -= 1


@dataclass
class Client:
    """One ASGI request and what came back."""

    ingress: Ingress
    body: bytes = b""
    path: str = "/v1/completions"
    headers: Sequence[tuple[str, str]] = ()
    sent: list[MutableMapping[str, Any]] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the client reads nothing."""
    is_sent: bool = False

    def __post_init__(self) -> None:
        self.reads.set()

    async def run(self) -> "Client":
        scope = {
            **{"type": "http", "method": "POST", "path": self.path, "query_string": b"a=%20"},
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers],
        }
        async with asyncio.timeout(SOON_S):
            await self.ingress.__serve_build_asgi_app__()(scope, self._receive, self._send)
        return self

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self.is_sent:
            self.is_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        await self.reads.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def data(self) -> bytes:
        return b"".join(own.get("body", b"") for own in self.sent[1:])

    @property
    def code(self) -> str:
        return str(json.loads(self.data)["error"]["code"])


@dataclass
class Rig:
    ingress: Ingress
    handle: Handle
    fakes: Sequence[Fake]
    prefill: Sequence[Fake] = ()

    def client(self, **fields: Any) -> Client:
        body = json.dumps({"prompt": "x" * 2000, "stream": True}).encode()
        return Client(self.ingress, **{"body": body, **fields})

    async def ask(self, **fields: Any) -> Client:
        return await self.client(**fields).run()


def play(
    scenario: Callable[[Rig], Awaitable[None]], *fakes: Fake, prefill: Sequence[Fake] = (), **settings: Any
) -> None:
    """Run a scenario; at its end no request counts at a replica any more."""

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for fake in (*fakes, *prefill):
                await stack.enter_async_context(fake)
            config = RayConfig(**{"choice_timeout": 0.2, "connect_timeout": 0.2, **settings})
            app = RayApp("tiny", config, ServerConfig(max_body_bytes=4096), {})
            handles = [Handle(own) for own in (fakes, prefill) if own or own is fakes]
            ingress = Ingress(app, *handles)
            await stack.enter_async_context(ingress._upstream)
            await scenario(Rig(ingress, handles[0], fakes, prefill))
            assert not any(handle.held for handle in handles)
            for group in filter(None, (ingress._replicas, ingress._prefill)):
                for load in group.fleet.loads.values():
                    assert (load.in_flight, load.reading) == (0, 0)

    asyncio.run(run())


def test_a_request_reaches_a_replica_unchanged_and_its_answer_the_client() -> None:
    async def scenario(rig: Rig) -> None:
        named = [
            ("Authorization", "Bearer k"),
            ("X-Request-ID", "mine"),
            ("Connection", "x-hop"),
            ("X-Hop", "1"),
        ]
        client = await rig.ask(headers=named)
        (seen,) = rig.fakes[0].seen
        assert (client.status, json.loads(client.data)) == (200, {"ok": True})
        assert (seen.method, seen.path, seen.body) == ("POST", "/v1/completions?a=%20", client.body)
        assert seen.headers["Authorization"] == "Bearer k" and seen.headers["X-Request-ID"] == "mine"
        assert "X-Hop" not in seen.headers

    play(scenario, Fake())


def test_a_prompt_goes_where_its_prefix_was_sent() -> None:
    async def scenario(rig: Rig) -> None:
        for i in range(6):
            body = json.dumps({"prompt": "x" * 2000 + "y" * i, "stream": True}).encode()
            await rig.ask(body=body)
        assert sorted(len(fake.seen) for fake in rig.fakes) == [0, 0, 6]

    play(scenario, Fake(), Fake(), Fake())


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_retried_elsewhere_and_passed_on_if_all_refuse(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(4):
            assert (await rig.ask()).status == 200
        assert len(rig.fakes[1].seen) == 4
        rig.fakes[1].answer = rig.fakes[0].answer
        client = await rig.ask()
        assert client.status == status and (b"retry-after", b"7") in client.sent[0]["headers"]
        assert client.data == f'{{"error": {{"message": "refused with {status}"}}}}'.encode()
        assert rig.fakes[0].seen

    play(scenario, Fake(refusing(status, **{"Retry-After": "7"})), Fake())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 500, 504])
def test_other_errors_are_passed_on_at_once(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask()
        assert client.status == status and sum(len(fake.seen) for fake in rig.fakes) == 1
        for load in rig.ingress._replicas.fleet.loads.values():
            assert load.measured.sums(time.monotonic()) == NONE, "an error says nothing about prefill"

    play(scenario, Fake(refusing(status)), Fake(refusing(status)))


def test_a_replica_that_cannot_be_reached_is_passed_over() -> None:
    async def scenario(rig: Rig) -> None:
        rig.handle.urls["r0"] = "http://127.0.0.1:1"
        for _ in range(4):
            assert (await rig.ask()).status == 200
        rig.handle.urls = {"r0": "http://127.0.0.1:1"}
        client = await rig.ask()
        assert (client.status, client.code) == (503, "no_replica")

    play(scenario, Fake(), Fake())


def test_at_most_two_replicas_are_lost_with_one_request() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask()
        assert (client.status, client.code) == (502, "replica_lost")
        assert sum(len(fake.seen) for fake in rig.fakes) == 2

    play(scenario, Fake(reset), Fake(reset), Fake(reset))


def test_without_replicas_a_request_ends_with_503() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask()
        assert (client.status, client.code) == (503, "no_replica")

    play(scenario)


def test_a_replica_that_sends_nothing_ends_with_504() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask()
        assert (client.status, client.code) == (504, "replica_timeout")

    play(scenario, Fake(never), answer_timeout=0.1)


def test_bodies_in_flight_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "KEPT_BYTES", 1)

    async def scenario(rig: Rig) -> None:
        """Four bodies of the largest size fit; one key gets half of them."""
        body = b"x" * 4000
        mine, other = [("Authorization", "mine")], [("Authorization", "other")]
        clients = [rig.client(body=body, headers=mine) for _ in range(2)]
        running = [asyncio.create_task(client.run()) for client in clients]
        await until(lambda: len(rig.fakes[0].seen) == 1 and len(running) == 2)
        await until(lambda: running[1].done() or len(rig.fakes[0].seen) == 2)
        assert clients[1].status == 429 and clients[1].code == "too_many_requests"
        rig.fakes[0].answer = ok
        assert (await rig.ask(body=b"x" * 500, headers=other)).status == 200
        clients[0].leave.set()
        await asyncio.wait(running)
        assert (await rig.ask(body=body, headers=mine)).status == 200

    play(scenario, Fake(never))


def test_a_slow_client_holds_up_the_replica_and_not_the_ingresss_memory() -> None:
    sent = [0]

    async def pour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2000):  # 125 MiB
            await response.write(b"x" * 65536)
            sent[0] += 65536
        return response

    async def scenario(rig: Rig) -> None:
        client = rig.client()
        client.reads.clear()
        running = asyncio.create_task(client.run())
        before = -1
        while before != sent[0] or not sent[0]:  # until the transfer stalls
            before = sent[0]
            await asyncio.sleep(0.3)
        assert sent[0] < 24 << 20, "what the connection's buffers hold, and no more"
        client.leave.set()
        await running

    play(scenario, Fake(pour))


def test_eight_streams_of_two_hundred_events_come_whole_and_in_order() -> None:
    events = [b'data: {"n": %d}\n\n' % i for i in range(200)]

    async def scenario(rig: Rig) -> None:
        bodies = [json.dumps({"prompt": f"{i}", "stream": True}).encode() for i in range(8)]
        for client in await asyncio.gather(*(rig.ask(body=body) for body in bodies)):
            assert client.data == b"".join(events)
        assert {len(fake.seen) for fake in rig.fakes} == {4}, "the load factor spreads them"

    play(scenario, *(Fake(streaming(*events, pause_s=0.005)) for _ in range(2)))


def test_a_compressed_body_is_for_the_replica_to_decompress() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask(body=gzip.compress(b'{"prompt": "x"}'), headers=[("Content-Encoding", "gzip")])
        (seen,) = rig.fakes[0].seen
        assert seen.body == b'{"prompt": "x"}', "the stand-in decompresses by the header"
        assert seen.headers["Content-Encoding"] == "gzip"

    play(scenario, Fake())


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask(body=b"x" * 5000)
        assert client.status == 413 and not rig.fakes[0].seen

    play(scenario, Fake())


@pytest.mark.parametrize(
    ("path", "headers", "says"),
    [
        ("/v1/completions", (), b'data: {"error": {"message": "The replica was lost during its answer."'),
        ("/v1/messages", (), b'event: error\ndata: {"type": "error", "error": {"type": "api_error"'),
        ("/v1/responses", (), b'event: error\ndata: {"type": "error", "code": "replica_lost"'),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error_event(
    path: str, headers: Sequence[tuple[str, str]], says: bytes
) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask(path=path, headers=headers)
        assert client.status == 200
        start, end = client.data.split(EVENT)
        assert start == b"" and end.startswith(says), "half an event is not passed on"
        assert end.endswith(b"data: [DONE]\n\n") == (path == "/v1/completions")
        assert not client.sent[-1].get("more_body")

    play(scenario, Fake(streaming(EVENT, b'data: {"n"', pause_s=0.01, then=reset)))


def test_a_client_that_hangs_up_is_heard_by_the_replica() -> None:
    async def scenario(rig: Rig) -> None:
        client = rig.client()
        running = asyncio.create_task(client.run())
        await until(lambda: bool(rig.fakes[0].seen))
        assert sum(load.in_flight for load in rig.ingress._replicas.fleet.loads.values()) == 1
        client.leave.set()
        await rig.fakes[0].seen[0].left.wait()
        await running
        assert not client.sent

    play(scenario, Fake(never))


def test_a_stored_response_goes_to_the_replica_that_has_it() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask(path="/v1/responses")
        (owner,) = [fake for fake in rig.fakes if fake.seen]
        for _ in range(4):
            await rig.ask(path="/v1/responses/resp_1", body=b"")
            body = json.dumps({"input": "other", "previous_response_id": "resp_1"}).encode()
            await rig.ask(path="/v1/responses", body=body)
        assert len(owner.seen) == 9

    play(scenario, *(Fake(streaming(b'{"id": "resp_1"}')) for _ in range(3)))


def test_all_replicas_are_flushed() -> None:
    prompt = look_at(json.dumps({"prompt": "x" * 2000}).encode(), {})

    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(path="/flush_cache", body=b"")).status == 200
        assert all([own.path for own in fake.seen] == ["/flush_cache?a=%20"] for fake in rig.fakes)
        rig.fakes[1].answer = refusing(401)
        await rig.ask()
        assert any(rig.ingress._replicas.fleet.loads[name].known.hit(prompt) for name in ("r0", "r1"))
        assert (await rig.ask(path="/flush_cache", body=b"")).status == 401
        assert not any(rig.ingress._replicas.fleet.loads[name].known.hit(prompt) for name in ("r0", "r1"))

    play(scenario, Fake(), Fake())


def test_a_replica_that_is_gone_is_forgotten() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask()
        assert {*rig.ingress._replicas.fleet.loads} == {"r0", "r1"}
        del rig.handle.urls["r0"]
        await rig.ask()
        assert {*rig.ingress._replicas.fleet.loads} == {"r1"}

    play(scenario, Fake(), Fake())
