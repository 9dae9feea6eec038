"""Overhead of the router over a replica alone, measured alternately in the same rounds.

`python -m tests.route.overhead` prints the time to first byte and the lag of stream events, from a stand-in
replica that timestamps its events, and a real replica's TTFT.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import aiohttp
from aiohttp import web

from specdec.config.options import at_least
from tests.route.live_router import LiveRouter
from tests.route.rig import Fake, Seen, streaming
from tests.server.live import Live

STREAMS, EVENTS, PAUSE_S = 8, 200, 0.005
PROMPT = "def f(x):\n    return x\n\n\n"
Times = list[float]


async def replica() -> None:
    """Serve as a replica until stdin ends: stream events hold the time, other responses are empty."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        if not json.loads(seen.body).get("stream"):
            return await streaming(b"{}")(request, seen)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        start_s = time.monotonic()
        for i in range(EVENTS):
            await asyncio.sleep(max(start_s + i * PAUSE_S - time.monotonic(), 0))
            await response.write(b"data: %d\n\n" % time.monotonic_ns())
        await response.write_eof()
        return response

    async with Fake(answer) as own:
        print(f"serving at {own.url}/v1", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def first_bytes(client: aiohttp.ClientSession, url: str, body: bytes, count: int) -> Times:
    """Send requests over one connection; return the time to first byte of each."""
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        async with client.post(f"{url}/v1/completions", data=body) as answer:
            await answer.content.readany()
            times.append(time.perf_counter() - start_s)
            await answer.read()
    return times


async def lags(client: aiohttp.ClientSession, url: str) -> tuple[Times, Times]:
    """Read concurrent streams; return the lag of their first events, and of all others."""
    first: Times = []
    rest: Times = []

    async def read(number: int) -> None:
        async with client.post(
            f"{url}/v1/completions", json={"prompt": f"{number}", "stream": True}
        ) as answer:
            own = []
            async for line in answer.content:
                if line.startswith(b"data: "):
                    own.append((time.monotonic_ns() - int(line[6:])) / 1e9)
            assert len(own) == EVENTS
            first.append(own[0])
            rest.extend(own[1:])

    await asyncio.gather(*map(read, range(STREAMS)))
    return first, rest


async def rate(client: aiohttp.ClientSession, url: str, count: int) -> float:
    """Return the requests per second of 32 clients."""
    left = iter(range(count))

    async def ask() -> None:
        for _ in left:
            async with client.post(f"{url}/v1/completions", data=b'{"prompt": "x"}') as answer:
                await answer.read()

    start_s = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(32)))
    return count / (time.perf_counter() - start_s)


async def compare(alone: str, routed: str, rounds: int) -> None:
    """Compare the stand-in replica alone and routed."""
    found: dict[str, list[Times]] = {}
    rates: list[list[float]] = [[], []]
    async with aiohttp.ClientSession() as client:
        for turn in range(rounds + 1):
            for side, url in enumerate((alone, routed)):
                own = {
                    "first byte, 40 bytes of prompt": await first_bytes(client, url, _body(40), 100),
                    "first byte, 32 KiB of prompt": await first_bytes(client, url, _body(32768), 50),
                }
                first, rest = await lags(client, url)
                own |= {"lag of a stream's first event": first, "lag of all others": rest}
                speed = await rate(client, url, 1000)
                if turn:  # the first warms up
                    rates[side].append(speed)
                    for name, times in own.items():
                        found.setdefault(name, [[], []])[side].extend(times)
    for name, (before, after) in found.items():
        print(f"{name}: alone {_told(before)}, routed {_told(after)}", flush=True)
    before, after = map(statistics.median, rates)
    print(f"requests a second: alone {before:.0f}, routed {after:.0f}", flush=True)


async def compare_tokens(alone: str, routed: str, rounds: int) -> None:
    """Compare the TTFT of a real server."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}).encode()
    times: list[Times] = [[], []]
    async with aiohttp.ClientSession() as client:
        for turn in range(rounds + 1):
            for side, url in enumerate((alone, routed)):
                own = await first_bytes(client, url, body, 20)
                times[side] += own if turn else []
    apart_s = statistics.median(times[1]) - statistics.median(times[0])
    print(f"tiny's first token: alone {_told(times[0])}, routed {_told(times[1])}: {apart_s * 1e3:+.2f} ms")


def _body(size: int) -> bytes:
    return json.dumps({"prompt": (PROMPT * (size // len(PROMPT) + 1))[:size], "model": "tiny"}).encode()


def _told(times: Sequence[float]) -> str:
    cuts = statistics.quantiles(times, n=100)
    return f"p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--replica", action="store_true", help="be the replica that writes events")
    args = parser.parse_args()
    if args.replica:
        asyncio.run(replica())
        return
    with ExitStack() as stack:
        command = [sys.executable, "-m", "tests.route.overhead", "--replica"]
        fake = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert fake.stdout and fake.stdin
        url = fake.stdout.readline().split()[2].removesuffix("/v1")
        router = stack.enter_context(LiveRouter("--replicas", url))
        router.wait(1)
        asyncio.run(compare(url, router.url, args.rounds))
        fake.stdin.close()
    with Live("--draft", "none") as live, LiveRouter("--replicas", live.url) as router:
        router.wait(1)
        asyncio.run(compare_tokens(live.url, router.url, args.rounds))


if __name__ == "__main__":
    main()
