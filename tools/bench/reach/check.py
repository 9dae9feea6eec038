"""Checks before timing: each route returns one engine's texts, and fetches KV where it should."""

from collections.abc import Sequence

import aiohttp

from specdec.errors import EngineError
from tools.bench.reach.reply import StreamedReply
from tools.bench.reach.requests import RequestBodies, salted
from tools.bench.reach.routes import BenchRoute

PROMPTS, ANSWER = 6, 48
TEMPERATURES = (0.0, 0.8)


async def check_texts(
    session: aiohttp.ClientSession,
    one: BenchRoute,
    ways: Sequence[BenchRoute],
    requests: RequestBodies,
    prompt_tokens: int,
) -> int:
    """Compare each route's texts with one engine's, greedy and seeded; return how many were equal."""
    bodies = [
        requests.draw(prompt_tokens - number, ANSWER, temperature=TEMPERATURES[number % 2])
        for number in range(PROMPTS)
    ]
    expected = [_answered(one, await one.ask(session, salted(body))) for body in bodies]
    for way in ways:
        for number, body in enumerate(bodies):
            reply = _answered(way, await way.ask(session, salted(body)))
            if (reply.ids, reply.text) != (expected[number].ids, expected[number].text):
                raise EngineError(
                    f"{way.name} answers prompt {number} with {_beginning(reply)}, where {one.name} answers "
                    f"{_beginning(expected[number])}; no figure is shown"
                )
            read = len(body["prompt"]) - reply.cached_tokens
            if way.fetches and read > 1:
                raise EngineError(
                    f"{way.name}: of prompt {number} the engine that writes read {read} tokens itself, where "
                    "it should fetch all but the last; its log and /metrics say why; no figure is shown"
                )
    return len(ways) * len(bodies)


def _answered(way: BenchRoute, reply: StreamedReply) -> StreamedReply:
    if reply.failure is not None:
        raise EngineError(f"{way.name} does not answer ({reply.failure}); no figure is shown")
    return reply


def _beginning(reply: StreamedReply) -> str:
    return f"{reply.text[:60]!r} ({reply.ids[:8]}…)"
