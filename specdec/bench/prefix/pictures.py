"""The simulation's pictures: the hit rate by memory, and by the length of prompts, a pair for each trace."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.bench.charts import Bars, Line, bar_chart, line_chart
from specdec.bench.prefix.figures import EDGES, Record, bin_name


def write_pictures(records: Sequence[Record], folder: Path) -> None:
    """Write each picture as a file of its own."""
    for name, picture in pictures(records):
        (folder / f"{name}.svg").write_text(picture, "utf-8")


def pictures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Draw every trace; the bins are those of the memory in the middle of the sweep."""
    for trace in dict.fromkeys(r["trace"] for r in records):
        own = [r for r in records if r["trace"] == trace]
        yield f"{trace}-by-memory", by_memory(own, trace)
        sizes = sorted({r["memory_bytes"] for r in own})
        middle = sizes[len(sizes) // 2]
        yield f"{trace}-by-length", by_length([r for r in own if r["memory_bytes"] == middle], trace)


def by_memory(records: Sequence[Record], trace: str) -> str:
    """Draw a line for each policy."""
    lines = []
    for policy in _policies(records):
        own = sorted((r["memory_bytes"] / 1e9, r["hit_rate"]) for r in records if r["policy"] == policy)
        lines.append(Line(policy, [x for x, _ in own], [y for _, y in own]))
    return line_chart(
        lines,
        f"Cached tokens: {trace}",
        "memory of sequences and prefixes, GB",
        "share of all prompts' tokens",
        log_x=True,
        y_percent=True,
        y_range=(0, 1),
    )


def by_length(records: Sequence[Record], trace: str) -> str:
    """Draw a group of bars for each bin of lengths."""
    named = {own["tokens_each"] for r in records for own in r["bins"]}
    groups = [name for number in range(len(EDGES) + 1) if (name := bin_name(number)) in named]
    series = []
    for policy in _policies(records):
        (record,) = (r for r in records if r["policy"] == policy)
        rates = {own["tokens_each"]: own["hit_rate"] for own in record["bins"]}
        series.append(Bars(policy, [rates.get(group) for group in groups]))
    memory = records[0]["memory_bytes"] / 1e9
    return bar_chart(
        groups,
        series,
        f"By the prompt's length: {trace}, {memory:g} GB",
        "share of the prompts' tokens that were cached",
        shown=lambda value: f"{value:.0%}",
    )


def _policies(records: Sequence[Record]) -> list[str]:
    """Name those that keep anything, in the order of the table."""
    return list(dict.fromkeys(r["policy"] for r in records if r["policy"] != "none"))
