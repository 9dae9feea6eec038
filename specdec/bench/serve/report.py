"""The figures of a level, and the table of all levels."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from specdec.bench.report import percentile, table
from specdec.bench.serve.load import ConcurrencyLevel
from specdec.bench.serve.stream import RequestOutcome

FAILURES_SHOWN = 5
PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def level_report(level: ConcurrencyLevel) -> dict[str, Any]:
    """Summarise a level; times and tokens are those of completed requests."""
    done = [outcome for outcome in level.outcomes if outcome.failure is None]
    failures = Counter(outcome.failure for outcome in level.outcomes if outcome.failure)
    seconds = max(outcome.end_s for outcome in level.outcomes) - level.start_s
    tokens = sum(outcome.tokens for outcome in done)
    gaps = [after - before for outcome in done for before, after in pairwise(outcome.chunk_s)]
    return {
        "concurrency": level.concurrency,
        "requests": len(level.jobs),
        "completed": len(done),
        "failed": failures.total(),
        "failures": dict(failures.most_common()),
        "repeated_prompts": level.repeated,
        "seconds": seconds,
        "output_tokens": tokens,
        "counted_by": dict(Counter(outcome.counted_by for outcome in done)),
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(done) / seconds,
        "ttft_s": _percentiles([outcome.chunk_s[0] - outcome.start_s for outcome in done if outcome.chunk_s]),
        "inter_token_s": _percentiles([s for outcome in done if (s := outcome.inter_token_s) is not None]),
        "chunk_gap_s": _percentiles(gaps),
        "tokens_per_chunk": _per_chunk(done),
        "end_to_end_s": _percentiles([outcome.end_s - outcome.start_s for outcome in done]),
        "speculation": asdict(level.speculation) if level.speculation else None,
    }


def _percentiles(samples: Sequence[float]) -> dict[str, float] | None:
    """Return the percentiles shown; None without samples."""
    if not samples:
        return None
    return {name: percentile(samples, fraction) for name, fraction in PERCENTILES.items()}


def _per_chunk(done: Sequence[RequestOutcome]) -> float | None:
    chunks = sum(len(outcome.chunk_s) for outcome in done)
    return sum(outcome.tokens for outcome in done) / chunks if chunks else None


def render(report: Mapping[str, Any]) -> str:
    """Format the report."""
    prompts, settings = report["prompts"], report["settings"]
    kinds = ", ".join(f"{count} {name}" for name, count in prompts["categories"].items())
    lines = [
        f"{report['url']}: {report['model']}, /v1/{_path(report)}",
        f"{prompts['count']} prompts of {prompts['source']}: {kinds}; seed {report['seed']}",
        f"at most {settings['max_tokens']} tokens, temperature {settings['temperature']:g}; "
        f"client: {report['cpu']}, commit {report['commit']}",
    ]
    if settings["rate"]:
        lines.append(f"Poisson arrivals, {settings['rate']:g} per second; times count from arrival")
    if report["interrupted"]:
        lines.append("INTERRUPTED: only the requests completed by then")
    lines += ["", table(list(_rows(report))), "", *_legend(report["levels"])]
    lines += _notes(report)
    return "\n".join(lines)


def _path(report: Mapping[str, Any]) -> str:
    return "chat/completions" if report["endpoint"] == "chat" else "completions"


def _rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for level in report["levels"]:
        told = level["speculation"]
        yield {
            "concurrency": str(level["concurrency"]),
            "done": str(level["completed"]),
            "failed": str(level["failed"]),
            "TTFT ms": _ms(level["ttft_s"]),
            "TPOT ms": _ms(level["inter_token_s"]),
            "E2E s": _numbers(level["end_to_end_s"], 1.0),
            "tokens/s": f"{level['output_tokens_per_s']:,.1f}",
            "requests/s": f"{level['requests_per_s']:,.2f}",
            "acceptance length": f"{told['acceptance_length']:.2f}" if told else "not reported",
        }


def _ms(spread: Mapping[str, float] | None) -> str:
    return _numbers(spread, 1e3)


def _numbers(spread: Mapping[str, float] | None, scale: float) -> str:
    return " / ".join(f"{value * scale:.2f}" for value in spread.values()) if spread else "-"


def _legend(levels: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "times: median / p90 / p99 of completed requests; TPOT: a request's mean after its first token"
    counted = Counter[str]()
    for level in levels:
        counted.update(level["counted_by"])
    if counted["chunks"]:
        yield (
            f"TOKENS ARE COUNTED AS CHUNKS in {counted['chunks']} requests: the server reports no usage, "
            "and a chunk may hold several"
        )
    for level in levels:
        if told := level["speculation"]:
            yield f"concurrency {level['concurrency']}: {_drafts(told)}"


def _drafts(told: Mapping[str, Any]) -> str:
    parts = [f"acceptance length {told['acceptance_length']:.2f} by {told['source']}"]
    if told["drafted"] is not None:
        parts.append(f"{told['accepted']:,} of {told['drafted']:,} draft tokens accepted")
    if told["per_depth"]:
        parts.append(
            "by depth, relative to the depth before, " + " ".join(f"{rate:.0%}" for rate in told["per_depth"])
        )
    return "; ".join(parts)


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    if chats := report["prompts"]["chats_as_text"]:
        yield (
            f"{chats} prompts are chats: their first user turn was sent as plain text; "
            "with --chat the server applies its template"
        )
    for level in report["levels"]:
        where = f"concurrency {level['concurrency']}:"
        for reason, count in list(level["failures"].items())[:FAILURES_SHOWN]:
            yield f"{where} {count} failed: {reason}"
        if level["repeated_prompts"]:
            again = f"{where} {level['repeated_prompts']} prompts were sent before"
            if report["takes_salts"]:
                yield f"{again}, each with a new cache_salt: a server that supports it reuses nothing"
            else:
                yield f"{again}; THE SERVER REFUSES cache_salt AND MAY HAVE REUSED THEM"
