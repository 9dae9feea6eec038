"""Measure `specdec ray`: `python -m tests.ray.measure [REQUESTS]`.

Cache hits of two replicas behind the ingress, next to one server with the memory of both and to random
routing; time to first token and gaps between events, through the ingress and directly.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp

from tests.ray.live import LiveRay
from tests.server.live import Live

REQUESTS, TENANTS, STREAMS, TOKENS = 200, 16, 4, 8
WARM_UP = 16
"""Requests before a measurement, whose prefixes are flushed."""
MEMORY = 64 << 20
"""Bytes of one replica's arena."""


def prompts(count: int, seed: int = 0) -> list[str]:
    """Return prompts in order: each tenant's begin alike, and its conversations grow."""
    rng = random.Random(seed)
    words = [f"word{i}" for i in range(40)]
    starts = [" ".join(rng.choices(words, k=240)) for _ in range(TENANTS)]
    turns = {i: starts[i] for i in range(TENANTS)}
    found = []
    for _ in range(count):
        i = rng.randrange(TENANTS)
        fresh = len(turns[i]) > 2 * len(starts[i]) or rng.random() < 0.3
        turns[i] = (starts[i] if fresh else turns[i]) + " " + " ".join(rng.choices(words, k=40))
        found.append(turns[i])
    return found


def measure(name: str, server: Live, url_of: Callable[[], str], count: int) -> None:
    """Warm up, empty the caches, and print the figures."""
    asyncio.run(stream(url_of, prompts(WARM_UP, seed=1)))
    assert server.ask("/flush_cache", method="POST").status == 200
    print(f"{name:24} {asyncio.run(stream(url_of, prompts(count)))}", flush=True)


async def stream(url_of: Callable[[], str], asked: Sequence[str]) -> str:
    """Stream all prompts; return the figures."""
    firsts: list[float] = []
    gaps: list[float] = []
    read = cached = 0
    todo = iter(asked)
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
    times = f"first token {shown(firsts)} ms, gaps {shown(gaps)} ms"
    return f"cached {cached / read:6.1%}, {times}, {took_s:.0f} s"


def shown(seconds: Sequence[float]) -> str:
    """Return p50 / p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:.2f} / {cuts[98] * 1e3:.2f}"


def main() -> None:
    """Measure one way after the other, with empty caches."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else REQUESTS
    with LiveRay("--num-replicas", "2", "--memory-bytes", str(MEMORY)) as two:
        rng, urls = random.Random(1), [*two.wait(2).values()]
        measure("ingress", two, lambda: two.url, count)
        measure("random routing", two, lambda: rng.choice(urls), count)
    with Live("--memory-bytes", str(2 * MEMORY), is_fresh=True) as one:
        measure("one server, all memory", one, lambda: one.url, count)


if __name__ == "__main__":
    main()
