"""Hundreds of requests with random faults: each ends in one of a few ways, and nothing leaks."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.route.rig import Answering, Fake, Seen, ok, refusing, reset, rig, streaming, until

EVENTS = [b"data: %d\n\n" % i for i in range(5)]
WHOLE = b"".join(EVENTS)


async def reads(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"kv_transfer_params": {"x": 1}})


def by_chance(draw: random.Random, good: Answering) -> Answering:
    """Return a handler that mostly responds, and otherwise fails in one of all ways."""
    bad = [refusing(429), refusing(503), refusing(400), reset, streaming(*EVENTS[:2], then=reset)]

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(draw.random() * 0.01)
        own = good if draw.random() < 0.7 else draw.choice(bad)
        return await own(request, seen)

    return answer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["plain", "vllm", "sglang"])
def test_every_request_ends_and_nothing_is_left(kind: str, seed: int) -> None:
    draw, ends = random.Random(f"{kind} {seed}"), Counter[str]()

    async def ask(client: aiohttp.ClientSession, number: int) -> None:
        prompt = f"{number % 7} " * draw.choice((1, 600))
        body = json.dumps({"prompt": prompt, "stream": draw.random() < 0.7}).encode()
        asking = asyncio.create_task(read(client, body))
        if draw.random() < 0.2:
            await asyncio.sleep(draw.random() * 0.02)
            asking.cancel()
        await asyncio.wait({asking})
        ends["left" if asking.cancelled() else asking.result()] += 1

    async def read(client: aiohttp.ClientSession, body: bytes) -> str:
        try:
            async with client.post("/v1/completions", data=body) as answer:
                data = await answer.read()
        except aiohttp.ClientPayloadError:
            return "broken"
        if answer.status == 200:
            assert data == WHOLE, "what begins with 200 is one replica's whole answer"
        return str(answer.status)

    async def play() -> None:
        good = streaming(*EVENTS)
        writers = [Fake(by_chance(draw, good)) for _ in range(4)]
        settings: dict[str, Any] = {"failures": 1000}
        if kind != "plain":
            settings |= {"pd_protocol": kind, "decode": writers, "prefill_min_bytes": 100}
            settings["prefill"] = [Fake(by_chance(draw, reads)) for _ in range(2)]
        async with rig(*(writers if kind == "plain" else ()), **settings) as own:
            async with asyncio.TaskGroup() as group:
                for number in range(150):
                    group.create_task(ask(own.client, number))
                    await asyncio.sleep(0.001)
            await until(lambda: not own.router.state.tasks)
            assert all(each.in_flight == each.reading == 0 for each in own.replicas)
            for fake in writers:
                fake.answer = ok
            async with own.client.post("/v1/completions", data=b"{}") as answer:
                assert answer.status == 200, "it goes on"

    asyncio.run(play())
    assert ends["200"] > 40 and ends["left"] > 3 and ends["400"] > 0 and ends["broken"] > 0
    assert ends.keys() <= {"200", "left", "400", "broken", "429", "502", "503"}, ends
