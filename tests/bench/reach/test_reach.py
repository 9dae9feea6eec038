"""`python -m tools.bench reach` against stand-in engines; and the wire, if NIXL is installed."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestServer

from specdec.errors import ConfigError, EngineError
from specdec.models.folder import SHIPPED
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.text.tokenizer import load_tokenizer
from tests.bench.reach.engines import Engine
from tests.selection import EXHAUSTIVE
from tools.bench.options import ReachOptions
from tools.bench.reach.check import check_texts
from tools.bench.reach.reply import StreamedReply
from tools.bench.reach.requests import RequestBodies, salted
from tools.bench.reach.routes import BenchRoute, BootstrapRoomRoute, ProxiedRoute, StandaloneRoute
from tools.bench.reach.run import render
from tools.bench.reach.serve import measure_serving, serving_report
from tools.bench.reach.servers import surroundings, two_cores
from tools.bench.reach.steady import SteadinessCase, measure_steadiness
from tools.bench.reach.wire import PromptSlots, measure_wire

OPTIONS = ReachOptions(requests=2, rounds=2, rate=200.0, prompt_tokens=65, long_tokens=66, max_tokens=3)


def requests() -> RequestBodies:
    tokenizer = load_tokenizer(SHIPPED["tiny"])
    assert tokenizer
    return RequestBodies(tokenizer, 0)


@asynccontextmanager
async def served(*engines: Engine) -> AsyncIterator[tuple[aiohttp.ClientSession, list[str]]]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(TestServer(engine.app())) for engine in engines]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield session, [str(server.make_url("")).rstrip("/") for server in servers]


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def test_requests_are_drawn_by_the_seed_and_salted_apart() -> None:
    one, other = requests(), requests()
    bodies = [one.draw(100, 5), one.draw(100, 5)]
    assert bodies == [other.draw(100, 5), other.draw(100, 5)]
    assert bodies[0]["prompt"] != bodies[1]["prompt"]
    assert {len(body["prompt"]) for body in bodies} == {100}
    assert salted(bodies[0])["cache_salt"] != salted(bodies[0])["cache_salt"]


def test_prompts_longer_than_the_texts_wrap_around() -> None:
    drawn = requests()
    assert len(drawn.draw(len(drawn._ids) + 5, 1)["prompt"]) == len(drawn._ids) + 5


def test_plain_engines_take_turns() -> None:
    engines = Engine(), Engine()

    async def work() -> None:
        async with served(*engines) as (session, urls):
            way = StandaloneRoute("two", *urls)
            for _ in range(4):
                assert (await way.ask(session, {"prompt": [1, 2]})).text == "abc"

    run(work)
    assert [len(engine.bodies) for engine in engines] == [2, 2]


def test_the_vllm_route_passes_on_the_prefill_instances_answer() -> None:
    prefill, decode = Engine(lends=True), Engine()

    async def work() -> StreamedReply:
        async with served(prefill, decode) as (session, urls):
            return await ProxiedRoute(*urls).ask(session, {"prompt": [1, 2, 3], "max_tokens": 9})

    reply = run(work)
    (asked,), (handed,) = prefill.bodies, decode.bodies
    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert (handed["max_tokens"], handed["stream"]) == (9, True)
    assert handed["kv_transfer_params"] == {"lease": 1}
    assert (reply.ids, reply.cached_tokens, reply.failure) == ([0, 1, 2], 2, None)


def test_the_sglang_route_sends_both_engines_the_same_room() -> None:
    prefill, decode = Engine(lends=True), Engine()

    async def work() -> list[StreamedReply]:
        async with served(prefill, decode) as (session, urls):
            way = BootstrapRoomRoute(*urls, port=7)
            return [await way.ask(session, {"prompt": [1, 2, 3]}) for _ in range(2)]

    replies = run(work)
    rooms = [[body["bootstrap_room"] for body in engine.bodies] for engine in (prefill, decode)]
    assert rooms[0] == rooms[1] and rooms[0][0] != rooms[0][1]
    assert {body["bootstrap_port"] for body in decode.bodies} == {7}
    assert all(reply.cached_tokens == 2 and not reply.failure for reply in replies)


def test_refusals_become_part_of_the_reply() -> None:
    async def work() -> list[StreamedReply]:
        async with served(Engine()) as (session, (url,)):
            nowhere = f"{url}/nowhere"
            ways: list[BenchRoute] = [
                StandaloneRoute("one", nowhere),
                ProxiedRoute(nowhere, url),
                BootstrapRoomRoute(nowhere, url, 7),
            ]
            return [await way.ask(session, {"prompt": [1, 2]}) for way in ways]

    plain, proxied, rooms = run(work)
    assert plain.failure.startswith("HTTP 404")
    assert proxied.failure.startswith("prefill: HTTP 404") and rooms.failure.startswith("prefill: HTTP 404")


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (Engine(text=("a", "x", "c")), "answers prompt 0 with 'axc'"),
        (Engine(fetches=False), "read 65 tokens itself"),
    ],
    ids=["another text", "nothing fetched"],
)
def test_no_figure_where_texts_differ_or_nothing_is_fetched(decode: Engine, words: str) -> None:
    async def work() -> None:
        async with served(Engine(lends=True), decode, Engine()) as (session, urls):
            await check_texts(
                session, StandaloneRoute("one", urls[2]), [ProxiedRoute(*urls[:2])], requests(), 65
            )

    with pytest.raises(EngineError, match=words):
        run(work)


def test_equal_texts_pass_the_check() -> None:
    async def work() -> Any:
        async with served(Engine(lends=True), Engine(), Engine()) as (session, urls):
            ways: list[BenchRoute] = [
                ProxiedRoute(*urls[:2]),
                BootstrapRoomRoute(*urls[:2], port=7),
                StandaloneRoute("two", *urls[1:]),
            ]
            return await check_texts(session, StandaloneRoute("one", urls[2]), ways, requests(), 65)

    assert run(work) == 18


def test_each_way_gets_the_same_prompts_in_each_round() -> None:
    prefill, decode, first, second = engines = Engine(lends=True), Engine(), Engine(), Engine()

    async def work() -> Any:
        async with served(*engines) as (session, urls):
            ways: list[BenchRoute] = [StandaloneRoute("two", *urls[2:]), ProxiedRoute(*urls[:2])]
            return await measure_serving(session, ways, requests(), OPTIONS, lambda: None)

    replies = run(work)
    counted = 2 * OPTIONS.requests
    asked = [sorted(body["prompt"] for body in engine.bodies[4:]) for engine in (prefill, decode)]
    plain = sorted(body["prompt"] for body in [*first.bodies[2:], *second.bodies[2:]])
    assert asked[0] == asked[1] == plain and len(plain) == counted
    salts = [body["cache_salt"] for body in [*decode.bodies, *first.bodies, *second.bodies]]
    assert len({*salts}) == len(salts)
    report = serving_report(replies, OPTIONS.prompt_tokens)
    assert [own["requests"] for own in report.values()] == [counted, counted]
    assert [own["fetched"] for own in report.values()] == [0.0, 1.0]
    assert all(own["ttft_s"]["p50"] <= own["ttft_s"]["p95"] for own in report.values())


def test_tokens_share_the_time_of_the_step_that_brought_them() -> None:
    reply = StreamedReply(10.0, ids=[0] * 6, came=[(10.5, 2), (10.9, 1), (11.5, 3)])
    assert reply.first_s == 0.5
    assert reply.inter_token_s == pytest.approx(0.25)
    assert reply.token_s() == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert reply.token_s(11.0) == pytest.approx([0.4])
    assert reply.token_s(10.1) == []


def test_steadiness_is_reported_with_the_idle_figure() -> None:
    case = SteadinessCase(StandaloneRoute("one", "http://127.0.0.1"))
    case.idle_s, case.loaded_s = [0.001] * 20, [0.004] * 20
    report = case.report()
    assert report["times_idle"] == {"p50": 4.0, "p95": 4.0}
    failed = StreamedReply(0.0, ids=[0], came=[(1.0, 1)], failure="it broke")
    assert case.counted(failed) == [] and case.failures == ["it broke"]


def test_steadiness_uses_long_prompts_and_answers() -> None:
    engine = Engine()

    async def work() -> Any:
        async with served(engine) as (session, (url,)):
            return await measure_steadiness(
                session, [StandaloneRoute("one", url)], requests(), OPTIONS, lambda: None
            )

    report = run(work)
    lengths = [len(body["prompt"]) for body in engine.bodies]
    assert lengths.count(OPTIONS.long_tokens) == 1 + 4 * OPTIONS.rounds
    assert report["one"]["failures"] == [] and report["one"]["idle_token_s"]


def test_missing_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="cores: this process may not use 999999") as error:
        two_cores([0, 999_999])
    assert error.value.field == "cores"


def test_secrets_of_other_servers_reach_no_engine_of_the_benchmark() -> None:
    around = {"SPECDEC_REACH_SECRET": "of others", "SPECDEC_API_KEY": "of others", "PATH": "/bin"}
    plain, lent = surroundings({}, around), surroundings({"SPECDEC_REACH_SECRET": "own"}, around)
    assert "of others" not in {*plain.values(), *lent.values()}
    assert lent["SPECDEC_REACH_SECRET"] == "own" and plain["PATH"] == "/bin"


def test_prompts_start_after_the_reserved_slab() -> None:
    layout = Layout((KVShape(2, 8),), (StateShape(2, 16, 24, 3, 40),), torch.float32)
    slots = PromptSlots.of(layout, 100)
    assert len(slots.blocks) == layout.blocks_for(100)
    assert slots.blocks.start * layout.block_bytes >= layout.slab_bytes
    assert slots.state is not None
    assert slots.state * layout.slab_bytes >= slots.blocks.stop * layout.block_bytes


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")), reason="NIXL is absent"
)
@EXHAUSTIVE
def test_the_wire_brings_every_byte_between_two_processes() -> None:
    report = measure_wire(ReachOptions(only=["wire"], prompt_tokens=65, long_tokens=300))
    assert [case["tokens"] for case in report["cases"]] == [65, 300]
    assert [case["descriptors"] for case in report["cases"]] == [6, 20]
    assert all(case["bytes_per_s"] > 0 for case in report["cases"])


def test_a_report_is_laid_out_for_people() -> None:
    spread = {"p50": 0.001, "p95": 0.0025}
    report = {
        "model": "tiny",
        "cpu": "x",
        "commit": "c",
        "seed": 0,
        "cores": [0, 1],
        "texts_equal": 18,
        "options": OPTIONS.model_dump(),
        "serve": {
            "two": {
                "requests": 4,
                "failures": ["HTTP 500", "HTTP 500"],
                "ttft_s": spread,
                "inter_token_s": None,
                "fetched": 0.5,
            }
        },
        "steady": {
            "one": {
                "idle_token_s": spread,
                "loaded_token_s": spread,
                "times_idle": {"p50": 1.0, "p95": 1.0},
                "failures": [],
            }
        },
    }
    shown = render(report)
    assert "1.00 / 2.50" in shown and "2/4" in shown and "50%" in shown
    assert "two: 2 failed: HTTP 500" in shown
