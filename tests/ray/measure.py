"""Measure `specdec ray`: `python -m tests.ray.measure`.

Cache hits of two replicas behind the ingress, next to one server with the memory of both and to random
routing; time to first token and gaps between events, through the ingress and directly.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import aiohttp

from tests.ray.live import LiveRay
from tests.server.live import Live

REQUESTS, TENANTS, STREAMS, TOKENS = 500, 25, 4, 16
MEMORY = 24 << 20
"""Bytes of one replica's arena: not all prefixes of all tenants fit."""


def prompts() -> list[str]:
    """Return prompts in order: each tenant's begin alike, and its conversations grow."""
    rng = random.Random(0)
    words = [f"word{i}" for i in range(40)]
    starts = [" ".join(rng.choices(words, k=160)) for _ in range(TENANTS)]
    turns = {i: starts[i] for i in range(TENANTS)}
    found = []
    for _ in range(REQUESTS):
        i = rng.randrange(TENANTS)
        fresh = len(turns[i]) > 2 * len(starts[i]) or rng.random() < 0.3
        turns[i] = (starts[i] if fresh else turns[i]) + " " + " ".join(rng.choices(words, k=20))
        found.append(turns[i])
    return found


async def measure(name: str, url_of: Callable[[], str]) -> None:
    """Stream all prompts and print the figures."""
    firsts: list[float] = []
    gaps: list[float] = []
    read = cached = 0
    todo = iter(prompts())
    async with aiohttp.ClientSession() as session:

        async def work() -> None:
            nonlocal read, cached
            for prompt in todo:
                body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                last_s = start_s = time.perf_counter()
                is_first = True
                async with session.post(f"{url_of()}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        now_s = time.perf_counter()
                        (firsts if is_first else gaps).append(now_s - (start_s if is_first else last_s))
                        last_s, is_first = now_s, False
                        if usage := json.loads(line[6:]).get("usage"):
                            read += usage["prompt_tokens"]
                            cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        start_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(STREAMS)))
        took_s = time.perf_counter() - start_s
    print(
        f"{name:24} cached {cached / read:6.1%}, first token {shown(firsts)} ms, gaps {shown(gaps)} ms, "
        f"{took_s:.1f} s",
        flush=True,
    )


def shown(seconds: Sequence[float]) -> str:
    """Return p50 / p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:.2f} / {cuts[98] * 1e3:.2f}"


def main() -> None:
    """Measure one way after the other."""
    small, large = ("--memory-bytes", str(MEMORY)), ("--memory-bytes", str(2 * MEMORY))
    with Live(*large, is_fresh=True) as one:
        asyncio.run(measure("one server, all memory", lambda: one.url))
    for name in ("ingress", "random routing"):
        with LiveRay("--num-replicas", "2", *small) as two:
            urls = {"ingress": [two.url], "random routing": [*two.wait(2).values()]}[name]
            rng = random.Random(1)
            asyncio.run(measure(name, partial(rng.choice, urls)))


if __name__ == "__main__":
    main()
