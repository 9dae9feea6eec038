"""`specdec bench serve URL`: client-side latency and the server's draft acceptance by load."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import aiohttp
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.acceptance.prompts import BenchPrompt
from specdec.bench.options import ServeOptions
from specdec.bench.report import ReportOutput, environment, publish
from specdec.bench.serve.load import ConcurrencyLevel, LoadJob, arrivals, drive, warm_up
from specdec.bench.serve.report import level_report, render
from specdec.bench.serve.stream import KEY, SALT, RequestOutcome, RequestTemplate, ServerUnderTest
from specdec.errors import ConfigError, EngineError
from specdec.http.client import ask_model, check_url, reason

FEWEST, PER_PLACE = 16, 4
"""Default number of requests of a level: at least, and per concurrent request."""


def run(options: ServeOptions, prompts: Sequence[BenchPrompt], key: str | None, out: ReportOutput) -> None:
    """Measure and publish the report.

    Ctrl-C is raised again once the answered requests have been published.
    """
    base = _checked(options, prompts)
    levels = plan(options, prompts)
    told: dict[str, Any] = {"model": options.model, "takes_salts": True}
    interrupted = False
    try:
        asyncio.run(_measure(options, key, base, levels, told))
    except KeyboardInterrupt:
        interrupted = True
        if not any(level.outcomes for level in levels):
            raise
    report = {
        "benchmark": "serve",
        **environment(),
        "url": base,
        **told,
        **_describe_requests(options, prompts),
        "interrupted": interrupted,
        "levels": [level_report(level) for level in levels if level.outcomes],
    }
    publish(render(report), report, out)
    if interrupted:
        raise KeyboardInterrupt
    if not any(level["completed"] for level in report["levels"]):
        raise EngineError(f"url: {base} completed no request; the reasons stand above", field="url")


def plan(options: ServeOptions, prompts: Sequence[BenchPrompt]) -> list[ConcurrencyLevel]:
    """Plan every request: prompts are shuffled once by the seed; a level continues where the last ended."""
    order = list(prompts)
    random.Random(options.seed).shuffle(order)
    endless, sent, levels = enumerate(cycle(order)), Counter[str](), list[ConcurrencyLevel]()

    def job(number: int, prompt: BenchPrompt, due_s: float | None) -> LoadJob:
        said = repr((prompt.text, prompt.token_ids, prompt.messages))  # a file may contain it twice
        sent[said] += 1
        return LoadJob(prompt, options.seed + number, due_s, sent[said])

    def take(times_s: Sequence[float | None]) -> list[LoadJob]:
        return [job(*drawn, due_s) for due_s, drawn in zip(times_s, endless, strict=False)]

    for places in options.concurrency:
        warmup = take([None] * (places if options.warmup is None else options.warmup))
        jobs = take(arrivals(options.requests or max(FEWEST, PER_PLACE * places), options.rate, options.seed))
        levels.append(ConcurrencyLevel(places, warmup, jobs, sum(job.sending > 1 for job in jobs)))
    return levels


async def _measure(
    options: ServeOptions,
    key: str | None,
    base: str,
    levels: Sequence[ConcurrencyLevel],
    told: dict[str, Any],
) -> None:
    """Fill in the levels one by one, and the server's description."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limit = aiohttp.ClientTimeout(total=options.timeout)
    # One connection per request: some servers close a used connection, and the next request would fail.
    connections = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(headers=headers, timeout=limit, connector=connections) as session:
        told["model"] = await _find(session, base, options.model)
        request = RequestTemplate(
            model=told["model"],
            chat=options.chat,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
        )
        server = ServerUnderTest(session, base, request)
        try:
            for number, level in enumerate(levels, 1):
                _refuse_useless(base, await warm_up(server, level))
                of_all = f"level {number} of {len(levels)}: {level.concurrency} at a time"
                with _progress(len(level.jobs), of_all) as progress:
                    await drive(server, level, progress.update)
        finally:
            told["takes_salts"] = SALT in server.options


@contextmanager
def _progress(total: int, what: str) -> Iterator[Any]:
    with tqdm(total=total, desc=what, unit="request", leave=False, disable=None) as progress:
        yield progress


async def _find(session: aiohttp.ClientSession, base: str, model: str | None) -> str:
    """Return the model's name; without one, ask the server."""
    try:
        return model or await ask_model(session, base)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        usual = "check that it runs and answers GET /v1/models, or name the model with --model"
        is_locked = isinstance(error, aiohttp.ClientResponseError) and error.status in (401, 403)
        raise EngineError(
            f"url: the server at {base} did not return its model name ({reason(error)}); "
            f"{KEY if is_locked else usual}",
            field="url",
        ) from error


def _refuse_useless(base: str, outcomes: Sequence[RequestOutcome]) -> None:
    """Raise if every warm-up request failed."""
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    if outcomes and len(failures) == len(outcomes):
        raise EngineError(
            f"url: the server at {base} completed none of {len(failures)} requests to warm it up "
            f"({failures[0]})",
            field="url",
        )


def _describe_requests(options: ServeOptions, prompts: Sequence[BenchPrompt]) -> dict[str, Any]:
    """Describe the requests."""
    return {
        "endpoint": "chat" if options.chat else "completions",
        "prompts": {
            "source": str(options.prompts or "the package"),
            "count": len(prompts),
            "categories": Counter(prompt.category for prompt in prompts),
            "chats_as_text": 0 if options.chat else sum(bool(prompt.messages) for prompt in prompts),
        },
        "settings": {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "rate": options.rate,
            "timeout_s": options.timeout,
        },
        "seed": options.seed,
        "warmup": options.warmup,
    }


def _checked(options: ServeOptions, prompts: Sequence[BenchPrompt]) -> str:
    """Return the server's address; refuse token ids for a chat."""
    base = check_url(options.url)
    ids = next((prompt for prompt in prompts if prompt.token_ids is not None), None)
    if options.chat and ids:
        raise ConfigError(
            f"--chat: the prompt {ids.name!r} is token ids, and a chat takes text", field="chat"
        )
    return base
