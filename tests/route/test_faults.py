"""Replicas that refuse, vanish, hang or disconnect, clients that leave, and the effect on each side."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from specdec.ray.figures import read_figures
from specdec.route.addresses import Address, Role
from specdec.route.replicas import Replica
from specdec.route.run import drain
from specdec.route.watch import Watch
from tests.route.rig import (
    SOON_S,
    Answering,
    Fake,
    Rig,
    Seen,
    never,
    ok,
    refusing,
    reset,
    rig,
    streaming,
    until,
)

STREAM = {"prompt": "x", "stream": True}


def play(scenario: Callable[[Rig], Awaitable[None]], *fakes: Fake, **settings: Any) -> None:
    async def run() -> None:
        async with rig(*fakes, **settings) as own:
            await scenario(own)

    asyncio.run(run())


def asked(*fakes: Fake) -> int:
    return sum(len(fake.seen) for fake in fakes)


@pytest.mark.parametrize(
    ("bad", "why"), [(refusing(429), "status_429"), (refusing(503), "status_503"), (reset, "lost")]
)
def test_what_has_not_begun_is_asked_of_another_replica(bad: Answering, why: str) -> None:
    fakes = [Fake(bad), Fake(ok)]

    async def scenario(own: Rig) -> None:
        own.prefer(fakes[0])
        assert await own.post({"prompt": "x"}, X_Request_ID="mine") == (200, {"ok": True})
        (first,), (second,) = fakes[0].seen, fakes[1].seen
        assert first.body == second.body and first.headers["X-Request-ID"] == second.headers["X-Request-ID"]
        assert await own.figure("specdec:route_retries_total", why=why) == 1

    play(scenario, *fakes, failures=1000)


def test_a_replica_that_cannot_be_connected_is_passed_over() -> None:
    fake = Fake(ok)

    async def scenario(own: Rig) -> None:
        gone = next(each for each in own.replicas if each.url != fake.url)
        for i in range(8):
            gone.is_up = True  # as until its next check
            assert await own.post({"prompt": f"{i} or another"}) == (200, {"ok": True})
        assert await own.figure("specdec:route_retries_total", why="unreached") >= 1
        await until(lambda: not gone.is_up)

    play(scenario, fake, gone=1, failures=2)


def test_refusals_of_all_are_the_last_ones() -> None:
    fakes = [Fake(refusing(429, **{"Retry-After": "7"})) for _ in range(5)]

    async def scenario(own: Rig) -> None:
        async with own.client.post("/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 429 and answer.headers["Retry-After"] == "7"
            assert (await answer.json())["error"]["message"] == "refused with 429"
        assert asked(*fakes) == 3, "attempts are bounded"
        assert await own.figure("specdec:route_retries_total", why="status_429") == 3

    play(scenario, *fakes)


def test_what_ends_replicas_ends_two_at_most() -> None:
    fakes = [Fake(reset) for _ in range(5)]

    async def scenario(own: Rig) -> None:
        status, body = await own.post({"prompt": "x"})
        assert status == 502 and body["error"]["code"] == "replica_lost"
        assert asked(*fakes) == 2

    play(scenario, *fakes, attempts=5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_no_replica_is_an_error_of_its_own(path: str) -> None:
    fake = Fake()
    fake.is_ready = False

    async def scenario(own: Rig) -> None:
        async with own.client.post(path, json={"prompt": "x"}) as answer:
            body = await answer.json()
            assert answer.status == 503 and answer.headers["Retry-After"] == "1"
            assert answer.headers["Server"] == "specdec" and answer.headers["X-Request-ID"]
            kind = "overloaded_error" if path == "/v1/messages" else "service_unavailable_error"
            assert body["error"]["type"] == kind
        for address, status in (("/ready", 503), ("/health", 200)):
            async with own.client.get(address) as answer:
                assert answer.status == status and answer.headers["Server"] == "specdec"
        fake.is_ready = True
        await until(lambda: own.replicas[0].is_up)
        assert (await own.post({}, path))[0] == 200

    play(scenario, fake)


def test_a_stream_that_breaks_off_breaks_off_for_the_client() -> None:
    fakes = [Fake(streaming(b"data: 1\n\n", b"data: 2\n\n", then=reset)) for _ in range(3)]

    async def scenario(own: Rig) -> None:
        async with own.client.post("/v1/completions", json=STREAM) as answer:
            assert answer.status == 200
            got = [await answer.content.readline() for _ in range(4)]
            assert got == [b"data: 1\n", b"\n", b"data: 2\n", b"\n"], "what has come is handed on"
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert asked(*fakes) == 1, "what has begun is not asked of another"
        assert await own.figure("specdec:route_broken_total", who="replica") == 1

    play(scenario, *fakes)


def test_an_answer_of_a_known_length_that_breaks_off_is_too_short() -> None:
    async def short(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "10"})
        await response.prepare(request)
        await response.write(b"12345")
        await asyncio.sleep(0.02)
        return await reset(request, seen)

    fakes = [Fake(short), Fake(short)]

    async def scenario(own: Rig) -> None:
        async with own.client.post("/v1/completions", json={}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert asked(*fakes) == 1

    play(scenario, *fakes)


@pytest.mark.parametrize(
    "answer", [never, streaming(b"data: 1\n\n", then=never)], ids=["before the first byte", "after it"]
)
def test_a_client_that_leaves_is_gone_at_the_replica_too(answer: Answering) -> None:
    fakes = [Fake(answer), Fake(answer)]

    async def scenario(own: Rig) -> None:
        async def ask() -> None:
            async with own.client.post("/v1/completions", json=STREAM) as response:
                await response.read()

        asking = asyncio.create_task(ask())
        await until(lambda: asked(*fakes) == 1)
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        (seen,) = [s for fake in fakes for s in fake.seen]
        async with asyncio.timeout(20):
            await seen.left.wait()
        await until(lambda: not own.router.state.tasks)
        assert asked(*fakes) == 1 and all(each.in_flight == each.reading == 0 for each in own.replicas)

    play(scenario, *fakes)


def test_a_replica_that_says_nothing_is_given_up() -> None:
    fakes = [Fake(never), Fake(never)]

    async def scenario(own: Rig) -> None:
        status, body = await own.post({})
        assert status == 504 and body["error"]["code"] == "replica_timeout"
        assert asked(*fakes) == 1, "it may be at it still"
        (seen,) = [s for fake in fakes for s in fake.seen]
        await until(seen.left.is_set)

    play(scenario, *fakes, answer_timeout=0.3)


def test_garbage_is_an_error_and_not_the_clients() -> None:
    async def garbage(request: web.Request, seen: Seen) -> web.StreamResponse:
        assert request.transport
        request.transport.write(b"this is no HTTP\r\n\r\n")
        return await never(request, seen)

    fakes = [Fake(garbage), Fake(garbage), Fake(garbage)]

    async def scenario(own: Rig) -> None:
        status, body = await own.post({})
        assert status == 502 and body["error"]["code"] == "replica_lost"

    play(scenario, *fakes)


def test_checks_take_a_replica_out_and_in_again() -> None:
    fakes = [Fake(ok), Fake(ok)]

    async def scenario(own: Rig) -> None:
        fakes[0].is_ready = False
        first = next(each for each in own.replicas if each.url == fakes[0].url)
        checks = fakes[0].checks
        await until(lambda: not first.is_up)
        assert fakes[0].checks - checks >= 3, "one failure is none"
        before = len(fakes[0].seen)
        for i in range(8):
            assert (await own.post({"prompt": f"{i}"}))[0] == 200
        assert len(fakes[0].seen) == before
        fakes[0].is_ready, checks = True, fakes[0].checks
        await until(lambda: first.is_up)
        assert fakes[0].checks - checks >= 2
        assert await own.figure("specdec:route_replica_up", replica=fakes[0].url, role="both") == 1

    play(scenario, *fakes, failures=3, successes=2)


def test_a_replica_that_has_never_been_up_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fakes = [Fake(ok), Fake(ok)]
    fakes[0].is_ready = False

    async def scenario(own: Rig) -> None:
        await until(lambda: fakes[0].checks > 6)
        told = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert told == [f"{fakes[0].url} is down: /ready answers 503"]

    play(scenario, *fakes, failures=3)


def test_a_replica_of_another_role_than_it_is_given_for_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def told(wanted: Role, role: str, *, suits_both: bool) -> bool:
        caplog.clear()
        replica = Replica(Address("http://a:1", wanted, "a", 5600))
        for _ in range(2):
            replica.note_role(role, suits_both=suits_both)
        return len(caplog.records) == 1 and f"--role {wanted}" in caplog.text

    for wanted, other in ((Role.PREFILL, "decode"), (Role.DECODE, "prefill")):
        assert told(wanted, other, suits_both=True) and told(wanted, "", suits_both=True)
        assert told(wanted, "both", suits_both=False) and not told(wanted, "both", suits_both=True)
        assert not told(wanted, str(wanted), suits_both=False)
        assert not told(Role.BOTH, other, suits_both=False) and not told(Role.BOTH, "", suits_both=True)
    fake = Fake(ok)
    fake.role = "prefill"

    async def scenario(own: Rig) -> None:
        await until(lambda: own.replicas[0].told_role == "prefill")

    play(scenario, fake)


def test_the_file_of_replicas_is_followed(tmp_path: Path) -> None:
    fakes, path = [Fake(ok), Fake(streaming(b"1", then=never))], tmp_path / "replicas"

    async def run() -> None:
        async with fakes[0], fakes[1]:
            path.write_text(f"# two of them\n{fakes[0].url}\n\n{fakes[1].url}  # slow\n")
            async with rig(replicas_file=str(path)) as own:
                await until(lambda: len(own.replicas) == 2 and all(each.is_up for each in own.replicas))
                slow = next(each for each in own.replicas if each.url == fakes[1].url)
                own.replicas[0].in_flight += 10  # so that the slow one is chosen
                async with own.client.post("/v1/completions", json=STREAM) as answer:
                    assert await answer.content.readany() == b"1" and len(fakes[1].seen) == 1
                    own.replicas[0].in_flight -= 10
                    path.write_text(f"{fakes[0].url}\n")
                    await until(lambda: len(own.replicas) == 1)
                    for i in range(4):
                        assert (await own.post({"prompt": f"{i}"}))[0] == 200
                    assert len(fakes[1].seen) == 1 and not fakes[1].seen[0].left.is_set(), (
                        "its answer goes on"
                    )
                    for wrong in ("nonsense\n", "", "# none\n", f"{fakes[0].url}\n{fakes[0].url}\n"):
                        path.write_text(wrong)
                        await asyncio.sleep(0.1)
                        assert len(own.replicas) == 1 and own.replicas[0].is_up
                    path.unlink()
                    await asyncio.sleep(0.1)
                    assert (await own.post({}))[0] == 200
                    path.write_text(f"{fakes[1].url}\n{fakes[0].url}\n")
                    await until(lambda: len(own.replicas) == 2 and all(each.is_up for each in own.replicas))
                assert slow not in own.replicas

    asyncio.run(run())


def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    path.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:2\n")

    async def run() -> None:
        async with rig(replicas_file=str(path), check_period=1000.0) as own, asyncio.TaskGroup() as group:
            watch = Watch(own.router.state, own.client)
            for replica in own.replicas:
                watch.start(group, replica)
            path.write_text("http://127.0.0.1:1\n")
            await watch.follow(group)
            assert len(own.replicas) == 2, "perhaps half of it is there"
            path.write_text("http://127.0.0.1:1\nhttp://127.0.0.1:3\n")
            await watch.follow(group)
            assert [each.url[-1] for each in own.replicas] == ["1", "2"]
            await watch.follow(group)
            assert [each.url[-1] for each in own.replicas] == ["1", "3"]
            watch.stop()

    asyncio.run(run())


def test_the_addresses_of_a_name_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[str] = []
    fake = Fake(ok)

    async def run() -> None:
        async with fake:
            port = int(fake.url.rsplit(":", 1)[1])

            async def getaddrinfo(host: str, *rest: Any, **named: Any) -> list[Any]:
                if host != "replicas.example":
                    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, rest[0]))]
                assert rest[0] == port
                if not hosts:
                    raise socket.gaierror(socket.EAI_NONAME, "unknown")
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (own, port)) for own in (*hosts, *hosts)]

            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
            async with rig(replicas_dns=f"http://replicas.example:{port}") as own:
                assert not own.replicas and (await own.post({}))[0] == 503
                hosts.append("127.0.0.1")
                await until(lambda: own.router.state.fleet.is_ready)
                assert (await own.post({}))[0] == 200
                hosts.append("127.0.0.9")
                await until(lambda: len(own.replicas) == 2)
                hosts.clear()
                await asyncio.sleep(0.1)
                assert len(own.replicas) == 2, "a name that is not found changes nothing"
                hosts.append("127.0.0.1")
                await until(lambda: len(own.replicas) == 1)

    asyncio.run(run())


def test_more_than_may_be_under_way_is_refused() -> None:
    """One address gets half of the capacity; another one can use the rest."""
    fake = Fake(never)

    async def scenario(own: Rig) -> None:
        asking = [asyncio.create_task(own.post({})) for _ in range(2)]
        await until(lambda: asked(fake) == 2)
        async with asyncio.timeout(SOON_S):
            status, body = await own.post({})
        assert status == 429 and body["error"]["code"] == "too_many_requests" and asked(fake) == 2
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with aiohttp.ClientSession(own.router.url, connector=elsewhere) as client:
            asking.append(asyncio.create_task(Rig(own.router, client).post({})))
            await until(lambda: asked(fake) == 3)
        async with own.client.get("/ready") as answer:
            assert answer.status == 200
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)

    play(scenario, fake, max_requests=4)


@pytest.mark.parametrize("is_hurried", [False, True])
def test_what_is_under_way_ends_before_the_router_does(is_hurried: bool) -> None:
    gate = asyncio.Event()

    async def wait(request: web.Request, seen: Seen) -> web.StreamResponse:
        await gate.wait()
        return web.Response()

    fake = Fake(streaming(b"one", b"two", then=wait))

    async def scenario(own: Rig) -> None:
        hurried = asyncio.Event()
        async with own.client.post("/v1/completions", json=STREAM) as answer:
            assert await answer.content.readany()
            draining = asyncio.create_task(drain(own.router.state, hurried))
            await until(lambda: own.router.state.draining)
            status, body = await own.post({})
            assert status == 503 and body["error"]["code"] == "stopping"
            async with own.client.get("/ready") as ready:
                assert ready.status == 503
            assert not draining.done()
            if is_hurried:
                hurried.set()
                await draining
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            else:
                gate.set()
                await answer.read()
                await draining
            await until(lambda: not own.router.state.tasks)

    play(scenario, fake, drain_seconds=20.0)


def test_figures_of_replicas_are_read() -> None:
    fakes = [Fake(ok), Fake(ok)]
    fakes[0].arena, fakes[1].arena, fakes[1].waiting = 0.75, 0.25, 3

    async def scenario(own: Rig) -> None:
        await until(lambda: own.replicas[0].arena == 0.75 and own.replicas[1].arena == 0.25)
        assert own.replicas[1].waiting == 3 and own.replicas[0].models == {"tiny"}
        for name, value in (("arena_usage", 0.25), ("waiting", 3.0)):
            labels = {"replica": fakes[1].url, "role": "both"}
            assert await own.figure(f"specdec:route_replica_{name}", **labels) == value
        body = json.dumps({"prompt": "y" * 2000})
        for _ in range(2):
            await own.post(json.loads(body))
        assert await own.figure("specdec:route_prompt_bytes_total", known="yes") > 1000

    play(scenario, *fakes)


def test_figures_that_are_none_change_nothing() -> None:
    def line(name: str, value: str) -> bytes:
        return f'{name}{{model_name="m",engine="0"}} {value}\n'.encode()

    usage, waiting = "vllm:kv_cache_usage_perc", "vllm:num_requests_waiting"
    for value in ("1.2.3", "e", "1e999", "-1", "NaN", "+Inf", "", "1e300"):
        told = read_figures(line(usage, value) + line(waiting, value))
        assert told.waiting == 0 and 0 <= told.arena <= 1, value
    told = read_figures(line(waiting, "2.0") + line(waiting, "3") + line(usage, "0.5") + line(usage, "0.25"))
    assert told == (5.0, 0.5, frozenset({"m"}), "", 0.0)
    assert read_figures(b"\xff\x00 nothing of ours\n") == (0.0, 0.0, frozenset(), "", 0.0)


def test_eight_streams_of_two_hundred_events_come_whole_and_in_order() -> None:
    events = [b'data: {"n": %d}\n\n' % i for i in range(200)]
    fakes = [Fake(streaming(*events, pause_s=0.005)) for _ in range(2)]

    async def scenario(own: Rig) -> None:
        async def read(number: int) -> None:
            body = {"prompt": f"{number}", "stream": True}
            async with own.client.post("/v1/completions", json=body) as answer:
                assert await answer.read() == b"".join(events)

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(read(number))
        assert {len(fake.seen) for fake in fakes} == {4}, "the bound spreads them"

    play(scenario, *fakes)
