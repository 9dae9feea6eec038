"""Disaggregated prefill: the requests to both instances in either protocol, and failures."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.route.rig import Answering, Fake, Rig, Seen, never, refusing, reset, rig, streaming, until

PARAMS = '{"remote_port":5600,  "remote_engine_id":"e1","x":1.0e2,"specdec":{"leases":["l"]}}'
BODY = (
    b'{"model": "tiny", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 64,'
    b' "min_tokens": 3, "temperature": 1.0e-1, "unknown": [1, {"a": 2}], "prompt": "%s"}' % (b"word " * 300)
)
EVENTS = b'data: {"text": "a"}\n\ndata: [DONE]\n\n'


async def reads(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Respond as a prefill instance does."""
    text = f'{{"object": "text_completion", "kv_transfer_params": {PARAMS}, "choices": []}}'
    return web.Response(text=text, content_type="application/json")


WRITES = streaming(EVENTS)
Scenario = Callable[[Rig, list[Fake], list[Fake]], Awaitable[None]]


def writes_after(is_read: Callable[[], bool]) -> Answering:
    """Decode plain requests at once, and requests for a room once its prefill is complete."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        if b"bootstrap_room" in seen.body:
            await until(is_read)
        return await WRITES(request, seen)

    return answer


def play(
    scenario: Scenario,
    protocol: str,
    prefill: list[Answering],
    decode: list[Answering] | None = None,
    **settings: Any,
) -> None:
    """Play a scenario with replicas of both roles."""

    async def run() -> None:
        p, d = [Fake(own) for own in prefill], [Fake(own) for own in decode or [WRITES]]
        async with rig(prefill=p, decode=d, pd_protocol=protocol, **settings) as own:
            await scenario(own, p, d)

    asyncio.run(run())


async def ask(own: Rig, body: bytes = BODY, path: str = "/v1/completions", status: int = 200) -> bytes:
    async with own.client.post(path, data=body, headers={"Authorization": "Bearer k"}) as answer:
        assert answer.status == status
        return await answer.read()


def count(fakes: list[Fake]) -> int:
    return sum(len(fake.seen) for fake in fakes)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_vllm_asks_the_first_and_tells_the_second_what_it_said(name: str) -> None:
    path = "/v1/completions" if name == "max_tokens" else "/v1/chat/completions"
    body = BODY.replace(b'"max_tokens"', f'"{name}"'.encode())

    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        assert await ask(own, body, path) == EVENTS
        (first,), (second,) = p[0].seen, d[0].seen
        assert first.path == second.path == path
        assert first.headers["Authorization"] == second.headers["Authorization"] == "Bearer k"
        assert first.headers["X-Request-ID"] == second.headers["X-Request-ID"]
        wanted = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_host": None,
            "remote_port": None,
        }
        wanted |= {"remote_engine_id": None, "remote_block_ids": None}
        changes = {"max_tokens": 1, name: 1, "min_tokens": 0, "stream": False, "stream_options": None}
        assert json.loads(first.body) == {**json.loads(body), **changes, "kv_transfer_params": wanted}
        assert second.body == body[:-1] + b',"kv_transfer_params":' + PARAMS.encode() + b"}"
        assert await own.figure("specdec:route_prefills_total", reader="prefill") == 1

    play(scenario, "vllm", [reads])


def test_sglang_asks_both_at_once_and_names_a_room() -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        d[0].answer = writes_after(lambda: count(p) == 1)
        assert await ask(own) == EVENTS, "the second answers while the first reads"
        (first,), (second,) = p[0].seen, d[0].seen
        assert first.body == second.body and second.body.startswith(BODY[:-1])
        told = json.loads(second.body)
        assert told["bootstrap_host"] == "127.0.0.1" and told["bootstrap_port"] == 5600
        assert 0 <= told["bootstrap_room"] < 1 << 63
        assert {name: told[name] for name in json.loads(BODY)} == json.loads(BODY)
        await until(first.left.is_set)  # the unwanted request is cancelled

    play(scenario, "sglang", [never])


def test_sglang_names_a_room_for_each_prompt_of_a_list() -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        for prompt, is_list in (
            (["a " * 900, "b " * 900], True),
            ([1, 2, 3] * 300, False),
            ([[1] * 900, [2]], True),
        ):
            await ask(own, json.dumps({"prompt": prompt}, indent=2).encode())
            told = json.loads(d[0].seen[-1].body)
            if is_list:
                assert told["bootstrap_port"] == [5600, 5600] and told["bootstrap_host"] == ["127.0.0.1"] * 2
                assert len(set(told["bootstrap_room"])) == 2
            else:
                assert isinstance(told["bootstrap_room"], int)

    play(scenario, "sglang", [reads], prefill_min_bytes=10)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize("bad", [refusing(503), refusing(429), reset], ids=["503", "429", "reset"])
def test_another_one_reads_where_the_first_does_not(protocol: str, bad: Answering) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        own.prefer(p[0])
        d[0].answer = writes_after(lambda: len(p[1].seen) == 1)
        assert await ask(own) == EVENTS
        assert len(p[0].seen) == len(p[1].seen) == 1

    play(scenario, protocol, [bad, reads], failures=1000)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize("bad", [refusing(503), reset], ids=["503", "reset"])
def test_the_second_reads_itself_where_none_does(protocol: str, bad: Answering) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        d[0].answer = writes_after(lambda: False)
        assert await ask(own) == EVENTS
        assert d[0].seen[-1].body == BODY and count(p) >= 2
        assert await own.figure("specdec:route_prefills_total", reader="decode") == 1

    play(scenario, protocol, [bad, bad], failures=1000)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize("bad", [refusing(503), reset], ids=["503", "reset"])
def test_another_one_writes_where_the_second_does_not(protocol: str, bad: Answering) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        own.prefer(d[0])
        assert await ask(own) == EVENTS
        assert len(d[0].seen) == len(d[1].seen) == 1
        if protocol == "sglang":
            rooms = [json.loads(s.body)["bootstrap_room"] for fake in d for s in fake.seen]
            assert len(set(rooms)) == len(rooms), "a room is for one pair"
            assert len(p[0].seen) == len(rooms)
        else:
            assert len(p[0].seen) == 1, "the prompt is read once"

    play(scenario, protocol, [reads], [bad, WRITES], failures=1000)


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_writer_that_refuses_at_last_says_why(protocol: str) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        assert json.loads(await ask(own, status=429))["error"]["message"] == "refused with 429"
        assert count(d) == 2

    play(scenario, protocol, [reads], [refusing(429), refusing(429)], failures=1000)


def test_a_mistake_in_the_request_is_said_by_who_reads() -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        assert json.loads(await ask(own, status=400))["error"]["message"] == "refused with 400"
        assert not count(d)

    play(scenario, "vllm", [refusing(400), refusing(400)])


@pytest.mark.parametrize("said", [b"{}", b"[]", b"no json", b'{"kv_transfer_params": null}'])
def test_who_says_nothing_of_where_it_read_is_no_help(said: bytes) -> None:
    async def says(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=said, content_type="application/json")

    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        assert await ask(own) == EVENTS and d[0].seen[-1].body == BODY

    play(scenario, "vllm", [says])


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "short"}),
        ("/v1/responses", {"input": "x" * 2000}),
        ("/v1/messages", {"messages": "x" * 2000}),
        ("/tokenize", {"prompt": "x" * 2000}),
        ("/v1/completions", {"prompt": "x" * 2000, "echo": True}),
        ("/v1/completions", {"prompt": "x" * 2000, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "x" * 2000, "prompt_logprobs": 0}),
        ("/v1/completions", {"prompt": ["xx"] * 5000}),
        ("/v1/completions", {"prompt": [[1, 2]] * 5000}),
        ("/v1/completions", {"prompt": "x" * 2000, "kv_transfer_params": {}}),
    ],
)
def test_what_is_not_worth_it_goes_to_the_one_that_writes(
    protocol: str, path: str, fields: dict[str, Any]
) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        body = json.dumps(fields).encode()
        await ask(own, body, path)
        assert d[0].seen[-1].body == body and not count(p)

    play(scenario, protocol, [reads])


@pytest.mark.parametrize("value", [b"[,]", b"tru", b"[" * 5000 + b"]" * 5000])
def test_a_field_that_cannot_be_read_is_for_a_replica_to_refuse(value: bytes) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        body = b'{"prompt": "%b", "echo": %b}' % (b"x" * 2000, value)
        await ask(own, body)
        assert d[0].seen[-1].body == body and not count(p)

    play(scenario, "vllm", [reads])


def test_the_next_turn_is_read_where_the_last_one_was_written() -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        turns = [{"role": "user", "content": "a long one " * 300}]
        await ask(own, json.dumps({"messages": turns}).encode(), "/v1/chat/completions")
        turns += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and?"}]
        await ask(own, json.dumps({"messages": turns}).encode(), "/v1/chat/completions")
        assert count(p) == 1 and "kv_transfer_params" not in json.loads(d[0].seen[-1].body)

    play(scenario, "vllm", [reads])


@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_a_client_that_leaves_while_its_prompt_is_read_is_gone_there_too(protocol: str) -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        asking = asyncio.create_task(ask(own))
        await until(lambda: count(p) == 1 and (protocol == "vllm" or count(d) == 1))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait({asking})
        await until(p[0].seen[0].left.is_set)
        await until(lambda: all(s.left.is_set() for s in d[0].seen))
        await until(lambda: not own.router.state.tasks)
        assert all(each.in_flight == each.reading == 0 for each in own.replicas)

    play(scenario, protocol, [never], [never])


def test_replicas_that_only_read_get_nothing_else() -> None:
    async def scenario(own: Rig, p: list[Fake], d: list[Fake]) -> None:
        d[0].is_ready = False
        await until(lambda: not own.router.state.fleet.is_ready)
        assert json.loads(await ask(own, b'{"prompt": "x"}', status=503))["error"]["code"] == "no_replica"
        async with own.client.get("/ready") as answer:
            assert answer.status == 503
        assert not count(p)

    play(scenario, "vllm", [reads])
