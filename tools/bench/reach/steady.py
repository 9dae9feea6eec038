"""Streams under way while long prompts arrive: their ITL beside that without prompts."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from tools.bench.options import ReachOptions
from tools.bench.reach.reply import StreamedReply
from tools.bench.reach.requests import RequestBodies, salted
from tools.bench.reach.routes import BenchRoute
from tools.bench.reach.serve import milliseconds, percentiles

WRITER_TOKENS, WRITER_PROMPT = 512, 65
"""Output and prompt tokens of a stream under way."""
PROMPTS = 4
"""Long prompts of a round, sent one by one."""
PROMPT_ANSWER = 8
"""Tokens decoded after each long prompt."""


class SteadinessCase:
    """Token times of one route, idle and while prompts arrive."""

    def __init__(self, way: BenchRoute) -> None:
        self.way = way
        self.idle_s: list[float] = []
        self.loaded_s: list[float] = []
        self.failures: list[str] = []

    def counted(self, reply: StreamedReply, until_s: float = math.inf) -> list[float]:
        """Return a reply's token times up to a time; record a failure."""
        self.failures += [reply.failure] if reply.failure else []
        return [] if reply.failure else reply.token_s(until_s)

    def report(self) -> dict[str, Any]:
        idle, loaded = percentiles(self.idle_s), percentiles(self.loaded_s)
        return {
            "idle_token_s": idle,
            "loaded_token_s": loaded,
            "times_idle": {name: loaded[name] / idle[name] for name in idle} if idle and loaded else None,
            "failures": self.failures,
        }


async def measure_steadiness(
    session: aiohttp.ClientSession,
    ways: Sequence[BenchRoute],
    requests: RequestBodies,
    options: ReachOptions,
    on_prompt: Callable[[], object],
) -> dict[str, Any]:
    """Return the report of each route by its name; the routes take turns."""
    cases = [SteadinessCase(way) for way in ways]
    for case in cases:  # the first long prompt touches pages, and measures the cost of widths
        await case.way.ask(session, salted(requests.draw(options.long_tokens, PROMPT_ANSWER)))
    for _ in range(options.rounds):
        for case in cases:
            await _idle(session, case, requests, options.writers)
            await _loaded(session, case, requests, options, on_prompt)
    return {case.way.name: case.report() for case in cases}


async def _idle(
    session: aiohttp.ClientSession, case: SteadinessCase, requests: RequestBodies, writers: int
) -> None:
    """Time concurrent streams without other load."""

    async def write() -> None:
        case.idle_s += case.counted(await case.way.ask(session, _answer(requests)))

    await asyncio.gather(*(write() for _ in range(writers)))


async def _loaded(
    session: aiohttp.ClientSession,
    case: SteadinessCase,
    requests: RequestBodies,
    options: ReachOptions,
    on_prompt: Callable[[], object],
) -> None:
    """Time streams while long prompts arrive; restart finished streams until the last prompt is prefilled."""
    end_s = math.inf

    async def write() -> None:
        while time.perf_counter() < end_s:
            reply = await case.way.ask(session, _answer(requests))
            case.loaded_s += case.counted(reply, end_s)

    writing = asyncio.gather(*(write() for _ in range(options.writers)))
    for _ in range(PROMPTS):
        reply = await case.way.ask(session, salted(requests.draw(options.long_tokens, PROMPT_ANSWER)))
        case.failures += [reply.failure] if reply.failure else []
        on_prompt()
    end_s = time.perf_counter()
    await writing


def _answer(requests: RequestBodies) -> dict[str, Any]:
    return salted(requests.draw(WRITER_PROMPT, WRITER_TOKENS))


def steady_rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, own in report.items():
        times = own["times_idle"]
        yield {
            "way": name,
            "idle ms": milliseconds(own["idle_token_s"]),
            "while prompts come ms": milliseconds(own["loaded_token_s"]),
            "time / idle": " / ".join(f"{value:.2f}" for value in times.values()) if times else "-",
        }
