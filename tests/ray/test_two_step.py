"""Disaggregated prefill in the ingress: both requests of vLLM's protocol, and failures."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from specdec.ray.two_step import LEND
from tests.ray.fakes import Answering, Fake, Seen, never, refusing, reset, streaming, until
from tests.ray.test_ingress import Client, Rig, play

PARAMS = '{"remote_port":5600,  "remote_engine_id":"e1","x":1.0e2,"specdec":{"leases":["l"]}}'
BODY = (
    b'{"model": "tiny", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 64,'
    b' "min_tokens": 3, "temperature": 1.0e-1, "unknown": [1, {"a": 2}], "prompt": "%s"}' % (b"word " * 300)
)
EVENTS = b'data: {"text": "a"}\n\ndata: [DONE]\n\n'
DECODES = streaming(EVENTS)
CHAT = "/v1/chat/completions"


async def prefills(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Respond as a prefill instance does."""
    text = f'{{"object": "text_completion", "kv_transfer_params": {PARAMS}, "choices": []}}'
    return web.Response(text=text, content_type="application/json")


def once(bad: Answering, good: Answering) -> Answering:
    """Return a handler that fails at its first request."""
    answers = iter([bad])

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await next(answers, good)(request, seen)

    return answer


def count(fakes: Any) -> int:
    return sum(len(fake.seen) for fake in fakes)


async def answered(rig: Rig, **fields: Any) -> Client:
    client = await rig.ask(**{"body": BODY, **fields})
    assert (client.status, client.data) == (200, EVENTS)
    return client


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_first_answer_says_where_the_second_fetches_the_prompt(name: str) -> None:
    path = "/v1/completions" if name == "max_tokens" else CHAT
    body = BODY.replace(b'"max_tokens"', f'"{name}"'.encode())

    async def scenario(rig: Rig) -> None:
        await answered(rig, body=body, path=path, headers=[("Authorization", "Bearer k")])
        (first,), (second,) = rig.prefill[0].seen, rig.fakes[0].seen
        assert first.path == second.path == f"{path}?a=%20"
        assert first.headers["Authorization"] == second.headers["Authorization"] == "Bearer k"
        assert first.headers["X-Request-ID"] == second.headers["X-Request-ID"]
        changes = {"max_tokens": 1, name: 1, "min_tokens": 0, "stream": False, "stream_options": None}
        assert json.loads(first.body) == {**json.loads(body), **changes, "kv_transfer_params": LEND}
        assert second.body == body[:-1] + b',"kv_transfer_params":' + PARAMS.encode() + b"}"

    play(scenario, Fake(DECODES), prefill=[Fake(prefills)])


@pytest.mark.parametrize("bad", [refusing(503), refusing(429), reset], ids=["503", "429", "reset"])
def test_another_instance_prefills_if_the_first_does_not(bad: Answering) -> None:
    async def scenario(rig: Rig) -> None:
        await answered(rig)
        assert [len(fake.seen) for fake in rig.prefill] == [1, 1]
        assert b"kv_transfer_params" in rig.fakes[0].seen[-1].body

    answer = once(bad, prefills)
    play(scenario, Fake(DECODES), prefill=[Fake(answer), Fake(answer)])


@pytest.mark.parametrize(
    "bad", [refusing(429), refusing(500), reset, None], ids=["429", "500", "reset", "gone"]
)
def test_the_decode_instance_prefills_if_no_other_does(bad: Answering | None) -> None:
    async def scenario(rig: Rig) -> None:
        if bad is None:
            await rig.prefill[0].__aexit__()
        await answered(rig)
        assert rig.fakes[0].seen[-1].body == BODY

    play(scenario, Fake(DECODES), prefill=[Fake(bad or prefills)])


@pytest.mark.parametrize("bad", [refusing(503), reset], ids=["503", "reset"])
def test_a_prompt_is_prefilled_once_however_many_decode_instances_are_tried(bad: Answering) -> None:
    async def scenario(rig: Rig) -> None:
        await answered(rig)
        (first,), (second,) = (fake.seen for fake in rig.fakes)
        assert first.body == second.body and count(rig.prefill) == 1

    answer = once(bad, DECODES)
    play(scenario, Fake(answer), Fake(answer), prefill=[Fake(prefills)])


def test_a_decode_instance_that_refuses_at_last_says_why() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask(body=BODY)
        assert client.status == 429 and b"refused with 429" in client.data and count(rig.fakes) == 2

    play(scenario, Fake(refusing(429)), Fake(refusing(429)), prefill=[Fake(prefills)])


def test_a_mistake_in_the_request_is_reported_by_the_prefill_instance() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.ask(body=BODY)
        assert client.status == 400 and b"refused with 400" in client.data
        assert count(rig.prefill) == 1 and not count(rig.fakes)

    play(scenario, Fake(DECODES), prefill=[Fake(refusing(400)), Fake(refusing(400))])


@pytest.mark.parametrize("said", [b"{}", b"[]", b"no json", b'{"kv_transfer_params": null}'])
def test_an_answer_without_parameters_changes_nothing(said: bytes) -> None:
    async def says(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(body=said, content_type="application/json")

    async def scenario(rig: Rig) -> None:
        await answered(rig)
        assert rig.fakes[0].seen[-1].body == BODY

    play(scenario, Fake(DECODES), prefill=[Fake(says)])


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
        ("/v1/completions", {"prompt": "x" * 2000, "kv_transfer_params": {}}),
        ("/v1/completions", {"prompt": "x" * 2000, "bootstrap_room": 1}),
    ],
)
def test_other_requests_go_to_a_decode_instance_only(path: str, fields: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        body = json.dumps(fields).encode()
        await answered(rig, body=body, path=path)
        assert rig.fakes[0].seen[-1].body == body and not count(rig.prefill)

    play(scenario, Fake(DECODES), prefill=[Fake(prefills)])


@pytest.mark.parametrize("value", [b"[,]", b"tru", b"[" * 900 + b"]" * 900])
def test_a_field_that_cannot_be_parsed_is_for_a_replica_to_refuse(value: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        body = b'{"prompt": "%b", "echo": %b}' % (b"x" * 2000, value)
        await answered(rig, body=body)
        assert rig.fakes[0].seen[-1].body == body and not count(rig.prefill)

    play(scenario, Fake(DECODES), prefill=[Fake(prefills)])


def test_the_next_turn_is_prefilled_where_the_last_one_was_decoded() -> None:
    async def scenario(rig: Rig) -> None:
        turns = [{"role": "user", "content": "a long one " * 150}]
        await answered(rig, body=json.dumps({"messages": turns}).encode(), path=CHAT)
        turns += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "and?"}]
        await answered(rig, body=json.dumps({"messages": turns}).encode(), path=CHAT)
        assert count(rig.prefill) == 1
        assert "kv_transfer_params" not in json.loads(rig.fakes[0].seen[-1].body)

    play(scenario, Fake(DECODES), prefill=[Fake(prefills)])


def test_a_client_that_hangs_up_during_prefill_is_heard_there() -> None:
    async def scenario(rig: Rig) -> None:
        client = rig.client(body=BODY)
        running = asyncio.create_task(client.run())
        await until(lambda: count(rig.prefill) == 1)
        client.leave.set()
        await rig.prefill[0].seen[0].left.wait()
        await running
        assert not client.sent and not count(rig.fakes)

    play(scenario, Fake(DECODES), prefill=[Fake(never)])


def test_prefill_instances_get_nothing_else_and_are_flushed_too() -> None:
    async def scenario(rig: Rig) -> None:
        assert (await rig.ask(body=b'{"prompt": "x"}')).status == 200 and not count(rig.prefill)
        assert (await rig.ask(path="/flush_cache", body=b"")).status == 200
        assert [own.path for own in rig.prefill[0].seen] == ["/flush_cache?a=%20"]

    play(scenario, Fake(DECODES), prefill=[Fake(prefills)])
