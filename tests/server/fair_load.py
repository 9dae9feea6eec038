"""Three keys load one server: `python -m tests.server.fair_load [--seconds 600] [--unfair]`.

One floods it with many long choices, one streams one answer after another, two clients of the third come and
go. Prints tokens, answers, TTFT and pauses by key, and the total throughput.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.server.live import Live

PATH = "/v1/completions"
KEYS = ("flood", "steady", "sometimes")
PROMPTS = ("def fib(n):", "import os\n", "class Parser:\n    ", "for i in range(")


@dataclass
class Seen:
    """The results of one key."""

    tokens: int = 0
    requests: int = 0
    refused: int = 0
    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, key: str, body: dict[str, Any], seen: Seen) -> None:
    """Stream an answer and count its tokens."""
    start_s = last_s = time.perf_counter()
    headers = {"Authorization": f"Bearer {key}"}
    asked = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, **body}
    counted = 0
    async with session.post(PATH, json=asked, headers=headers) as answer:
        if answer.status != 200:
            seen.refused += 1
            await asyncio.sleep(0.5)
            return
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter()
            event = json.loads(line[6:])
            if event.get("usage"):
                seen.tokens += event["usage"]["completion_tokens"]
            if event["choices"]:
                (seen.gaps_s if counted else seen.first_s).append(now_s - (last_s if counted else start_s))
                last_s, counted = now_s, counted + 1
    seen.requests += 1


async def flood(session: aiohttp.ClientSession, seen: Seen, until_s: float) -> None:
    while time.monotonic() < until_s:
        body = {"prompt": random.choice(PROMPTS), "n": 64, "max_tokens": 400, "temperature": 1.0}
        await ask(session, "flood", body, seen)


async def steady(session: aiohttp.ClientSession, seen: Seen, until_s: float) -> None:
    while time.monotonic() < until_s:
        await ask(session, "steady", {"prompt": random.choice(PROMPTS), "max_tokens": 300}, seen)


async def sometimes(session: aiohttp.ClientSession, seen: Seen, until_s: float) -> None:
    while time.monotonic() < until_s:
        prompt = random.choice(PROMPTS) * random.randint(1, 60)
        await ask(session, "sometimes", {"prompt": prompt, "max_tokens": random.randint(4, 60)}, seen)
        await asyncio.sleep(random.expovariate(1.0))


async def load(url: str, seconds: float) -> dict[str, Seen]:
    """Run the load for some seconds; answers in flight at the end are not counted."""
    seen = {key: Seen() for key in KEYS}
    until_s = time.monotonic() + seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, read_bufsize=1 << 20) as session:
        tasks = [asyncio.create_task(flood(session, seen["flood"], until_s)) for _ in range(8)]
        tasks.append(asyncio.create_task(steady(session, seen["steady"], until_s)))
        tasks += [asyncio.create_task(sometimes(session, seen["sometimes"], until_s)) for _ in range(2)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


def spread(seconds: list[float]) -> str:
    """Format the median, the 99th percentile and the maximum."""
    own = sorted(seconds) or [float("nan")]
    return f"p50 {own[len(own) // 2]:.3f} s, p99 {own[int(0.99 * len(own))]:.3f} s, max {own[-1]:.3f} s"


def tokens_made(live: Live) -> int:
    return int(live.ask("/server_info", Authorization=f"Bearer {KEYS[0]}").json["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--unfair", action="store_true", help="serve in the order of arrival, to compare")
    args = parser.parse_args()
    entry = "tests.server.unfair" if args.unfair else "specdec.cli"
    with Live(*(part for key in KEYS for part in ("--api-key", key)), entry=entry) as live:
        before, start_s = tokens_made(live), time.perf_counter()
        seen = asyncio.run(load(live.url, args.seconds))
        rate = (tokens_made(live) - before) / (time.perf_counter() - start_s)
    print(f"{entry}: {rate:,.0f} tokens/s in all, of answers that ended or not")
    for key, own in seen.items():
        print(f"{key:>9}: {own.tokens:>8,} tokens of {own.requests} answers, {own.refused} refused;", end=" ")
        print(f"first token {spread(own.first_s)}; gaps {spread(own.gaps_s)}")


if __name__ == "__main__":
    main()
