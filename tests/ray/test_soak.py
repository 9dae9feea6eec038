"""Hundreds of requests with random faults: each ends in one of a few ways, and nothing leaks."""

import asyncio
import json
import random
from collections import Counter

import pytest
from aiohttp import web

from tests.ray.fakes import Answering, Fake, Seen, refusing, reset, streaming
from tests.ray.test_ingress import Rig, play

EVENTS = [b"data: %d\n\n" % i for i in range(5)]
WHOLE = b"".join(EVENTS)


def by_chance(draw: random.Random, good: Answering) -> Answering:
    """Return a handler that mostly responds, and otherwise fails in one of all ways."""
    bad = [refusing(429), refusing(503), refusing(400), reset, streaming(*EVENTS[:2], then=reset)]

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(draw.random() * 0.01)
        own = good if draw.random() < 0.7 else draw.choice(bad)
        return await own(request, seen)

    return answer


@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_and_nothing_is_left(seed: int) -> None:
    draw, ends = random.Random(seed), Counter[str]()

    async def ask(rig: Rig, number: int) -> None:
        prompt = f"{number % 7} " * draw.choice((1, 600))
        client = rig.client(body=json.dumps({"prompt": prompt, "stream": draw.random() < 0.7}).encode())
        running = asyncio.create_task(client.run())
        if draw.random() < 0.2:
            await asyncio.sleep(draw.random() * 0.02)
            client.leave.set()
        await running
        if client.leave.is_set():
            ends["left"] += 1
        elif client.status == 200 and client.data != WHOLE:
            assert WHOLE.startswith(client.data.partition(b'data: {"error"')[0])
            assert b"replica_lost" in client.data
            ends["broken"] += 1
        else:
            ends[str(client.status)] += 1

    async def scenario(rig: Rig) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(150):
                group.create_task(ask(rig, number))
                await asyncio.sleep(0.001)

    play(scenario, *(Fake(by_chance(draw, streaming(*EVENTS))) for _ in range(4)))
    assert ends["200"] > 40 and ends["left"] > 3 and ends["400"] > 0 and ends["broken"] > 0
    assert ends.keys() <= {"200", "left", "400", "broken", "429", "502", "503"}, ends
