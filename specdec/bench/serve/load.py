"""The load: a fixed number of concurrent requests, or random arrivals."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.bench.serve.speculation import SpeculationFigures, gauge, has_gauge, read_metrics, told
from specdec.bench.serve.stream import RequestOutcome, ServerUnderTest

READING_S = 1.0
"""Seconds between two readings of a gauge."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    prompt: BenchPrompt
    seed: int
    due_s: float | None = None
    """Seconds from the start to its arrival; None: as soon as a slot is free."""
    sending: int = 1
    """How many times its prompt has been sent in this run, including this time."""


@dataclass(slots=True)
class ConcurrencyLevel:
    """One concurrency level and its outcomes, which are added as they complete, so that a stop keeps them."""

    concurrency: int
    warmup: Sequence[LoadJob]
    """Uncounted requests sent before, with other prompts, so that they warm no cache for the counted ones."""
    jobs: Sequence[LoadJob]
    repeated: int
    """Number of prompts that this benchmark had sent before."""
    outcomes: list[RequestOutcome] = field(default_factory=list)
    start_s: float = 0.0
    speculation: SpeculationFigures | None = None


def arrivals(count: int, rate: float | None, seed: int) -> list[float | None]:
    """Draw arrival times: a Poisson process of `rate` per second, or None for a closed loop."""
    if rate is None:
        return [None] * count
    draw, at_s, times_s = random.Random(seed), 0.0, []
    for _ in range(count):
        times_s.append(at_s)
        at_s += draw.expovariate(rate)
    return [*times_s]


async def warm_up(server: ServerUnderTest, level: ConcurrencyLevel) -> list[RequestOutcome]:
    """Send the warm-up requests concurrently."""
    return await asyncio.gather(*(server.complete(job.prompt, job.seed, job.sending) for job in level.warmup))


async def drive(server: ServerUnderTest, level: ConcurrencyLevel, on_outcome: Callable[[], object]) -> None:
    """Send a level's requests; fill in its outcomes and the server's speculation metrics."""
    before = read_metrics(await server.metrics() or "")
    lengths: list[float] = []
    watch = asyncio.create_task(_watch(server, lengths)) if has_gauge(before) else None
    level.start_s = time.perf_counter()
    jobs = iter(level.jobs)
    try:
        await asyncio.gather(*(_work(server, level, jobs, on_outcome) for _ in range(level.concurrency)))
    finally:
        if watch:
            watch.cancel()
    after = read_metrics(await server.metrics() or "")
    if (length := gauge(after)) is not None:
        lengths.append(length)
    done = [outcome for outcome in level.outcomes if outcome.failure is None]
    level.speculation = told(done, before, after, lengths)


async def _work(
    server: ServerUnderTest,
    level: ConcurrencyLevel,
    jobs: Iterator[LoadJob],
    on_outcome: Callable[[], object],
) -> None:
    """Act as one client: send the next request when the last has been answered."""
    for job in jobs:
        due_s = None if job.due_s is None else level.start_s + job.due_s
        if due_s is not None:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        level.outcomes.append(await server.complete(job.prompt, job.seed, job.sending, due_s))
        on_outcome()


async def _watch(server: ServerUnderTest, lengths: list[float]) -> None:
    """Sample the gauge periodically."""
    while True:
        await asyncio.sleep(READING_S)
        if (length := gauge(read_metrics(await server.metrics() or ""))) is not None:
            lengths.append(length)
