"""The same arrivals through each route, in turn: TTFT and ITL."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from specdec.bench.report import percentile
from specdec.bench.serve.load import arrivals
from tools.bench.options import ReachOptions
from tools.bench.reach.reply import StreamedReply
from tools.bench.reach.requests import RequestBodies, salted
from tools.bench.reach.routes import BenchRoute

WARMUP = 4
"""Uncounted requests of each route, sent one by one."""


async def measure_serving(
    session: aiohttp.ClientSession,
    ways: Sequence[BenchRoute],
    requests: RequestBodies,
    options: ReachOptions,
    on_reply: Callable[[], object],
) -> dict[str, list[StreamedReply]]:
    """Return the replies of all rounds by route; each round draws new prompts and arrivals."""
    replies: dict[str, list[StreamedReply]] = {way.name: [] for way in ways}
    for way in ways:
        for _ in range(WARMUP):
            await way.ask(session, salted(requests.draw(options.prompt_tokens, options.max_tokens)))
    for number in range(options.rounds):
        bodies = [requests.draw(options.prompt_tokens, options.max_tokens) for _ in range(options.requests)]
        due_s = arrivals(options.requests, options.rate, (options.seed or 0) + number)
        # Rotate the order by round, so that no route always follows the same one.
        for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
            replies[way.name] += await _round(session, way, bodies, due_s, on_reply)
    return replies


async def _round(
    session: aiohttp.ClientSession,
    way: BenchRoute,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float | None],
    on_reply: Callable[[], object],
) -> list[StreamedReply]:
    start_s = time.perf_counter()

    async def ask(body: dict[str, Any], after_s: float) -> StreamedReply:
        await asyncio.sleep(max(0.0, start_s + after_s - time.perf_counter()))
        reply = await way.ask(session, salted(body), start_s + after_s)
        on_reply()
        return reply

    return await asyncio.gather(*(ask(body, at or 0.0) for body, at in zip(bodies, due_s, strict=True)))


def serving_report(replies: Mapping[str, Sequence[StreamedReply]], prompt_tokens: int) -> dict[str, Any]:
    """Summarise each route; times are those of successful requests."""
    return {name: _figures(own, prompt_tokens) for name, own in replies.items()}


def _figures(replies: Sequence[StreamedReply], prompt_tokens: int) -> dict[str, Any]:
    done = [reply for reply in replies if reply.failure is None]
    later = [own for reply in done if (own := reply.inter_token_s) is not None]
    return {
        "requests": len(replies),
        "failures": [reply.failure for reply in replies if reply.failure],
        "ttft_s": percentiles([reply.first_s for reply in done]),
        "inter_token_s": percentiles(later),
        "fetched": sum(reply.cached_tokens == prompt_tokens - 1 for reply in done) / max(len(done), 1),
    }


def percentiles(samples: Sequence[float]) -> dict[str, float] | None:
    """Return the percentiles shown; None without samples."""
    if not samples:
        return None
    return {"p50": percentile(samples, 0.5), "p95": percentile(samples, 0.95)}


def serving_rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, own in report.items():
        yield {
            "way": name,
            "done": f"{own['requests'] - len(own['failures'])}/{own['requests']}",
            "first token ms": milliseconds(own["ttft_s"]),
            "per token ms": milliseconds(own["inter_token_s"]),
            "fetched": f"{own['fetched']:.0%}",
        }


def milliseconds(percentiles: Mapping[str, float] | None) -> str:
    return " / ".join(f"{value * 1e3:.2f}" for value in percentiles.values()) if percentiles else "-"
