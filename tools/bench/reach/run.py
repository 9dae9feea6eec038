"""`python -m tools.bench reach`: check the texts, then measure each part and print the report."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.bench.report import ReportOutput, environment, publish, table
from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.models.folder import find_folder
from specdec.text.tokenizer import load_tokenizer
from tools.bench.options import ReachOptions
from tools.bench.reach.check import check_texts
from tools.bench.reach.fleet import EngineFleet, started
from tools.bench.reach.requests import RequestBodies
from tools.bench.reach.serve import measure_serving, serving_report, serving_rows
from tools.bench.reach.servers import on_core
from tools.bench.reach.steady import PROMPTS, measure_steadiness, steady_rows
from tools.bench.reach.wire import measure_wire, wire_rows

LIMIT_S = 600.0
"""Timeout of one request, in seconds."""


def run(options: ReachOptions, config: EngineConfig, out: ReportOutput) -> None:
    """Measure and publish the report; publish nothing if a check fails."""
    report: dict[str, Any] = {
        "benchmark": "reach",
        **environment(),
        "model": options.model,
        "settings": config.model_dump(mode="json", exclude_unset=True),
        "options": options.model_dump(mode="json", exclude={"model"}),
        "seed": options.seed or 0,
    }
    if "wire" in options.only:
        report["wire"] = measure_wire(options)
    if {"serve", "steady"} & {*options.only}:
        with started(options, config) as fleet:
            report["cores"] = fleet.cores
            report |= asyncio.run(_measure(fleet, options, _requests(options)))
    publish(render(report), report, out)


def _requests(options: ReachOptions) -> RequestBodies:
    folder = find_folder(options.model)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ConfigError(
            f"model: {folder} has no tokenizer.json, by which prompts are drawn; name one that has",
            field="model",
        )
    return RequestBodies(tokenizer, options.seed or 0)


async def _measure(fleet: EngineFleet, options: ReachOptions, requests: RequestBodies) -> dict[str, Any]:
    """Measure the parts that need engines in separate processes."""
    report: dict[str, Any] = {}
    limit, connector = aiohttp.ClientTimeout(total=LIMIT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
        equal = await check_texts(
            session, fleet.one, [fleet.two, *fleet.apart], requests, options.prompt_tokens
        )
        report["texts_equal"] = equal
        if "serve" in options.only:
            ways = [fleet.two, *fleet.apart]
            total = len(ways) * options.rounds * options.requests
            with tqdm(total=total, desc="serve", unit="request", leave=False, disable=None) as progress:
                replies = await measure_serving(session, ways, requests, options, progress.update)
            report["serve"] = serving_report(replies, options.prompt_tokens)
        if "steady" in options.only:
            ways = [fleet.one, fleet.apart[0]]
            total = len(ways) * options.rounds * PROMPTS
            # Keep the client off the core whose ITL is measured.
            asker = on_core(fleet.cores[0] if fleet.cores else None)
            progress = tqdm(total=total, desc="steady", unit="prompt", leave=False, disable=None)
            with asker, progress:
                report["steady"] = await measure_steadiness(session, ways, requests, options, progress.update)
    return report


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    asked = report["options"]
    yield f"{report['model']}; {report['cpu']}; commit {report['commit']}; seed {report['seed']}"
    if wire := report.get("wire"):
        yield (
            f"\nThe wire: {wire['shape']}, blocks of {wire['block_bytes']:,} and states of "
            f"{wire['state_bytes']:,} bytes, by {wire['carrier']} from one process to another, every byte "
            f"compared; connected, with one read, in {wire['first_contact_s'] * 1e3:.0f} ms; ms: p50 / p95"
        )
        yield table([*wire_rows(wire)])
    if equal := report.get("texts_equal"):
        cores = report["cores"]
        placed = f"on cores {cores[0]} and {cores[1]}" if cores else "on shared cores"
        yield f"one thread per engine {placed}; {equal} texts equal to one engine's; times: p50 / p95"
    if serve := report.get("serve"):
        yield (
            f"\n{asked['rate']:g} requests/s with prompts of {asked['prompt_tokens']:,} tokens and "
            f"max_tokens {asked['max_tokens']}, {asked['rounds']} alternating rounds of {asked['requests']}:"
        )
        yield table([*serving_rows(serve)])
        yield from _failures(serve)
    if steady := report.get("steady"):
        yield (
            f"\n{asked['writers']} requests that decode while prompts of {asked['long_tokens']:,} tokens "
            "arrive one by one; ms per token:"
        )
        yield table([*steady_rows(steady)])
        yield from _failures(steady)


def _failures(part: Mapping[str, Any]) -> Iterator[str]:
    for name, own in part.items():
        for failure in dict.fromkeys(own["failures"]):
            yield f"{name}: {own['failures'].count(failure)} failed: {failure}"
