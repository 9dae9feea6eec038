"""Plots of the prefix cache simulation, two for each trace: hit rate by memory, and by prompt length."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.plots import Bars, Line, bar_plot, line_plot, save_plot
from specdec.bench.prefix.figures import EDGES, Record, bin_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plots(records: Sequence[Record], folder: Path) -> None:
    """Write each plot as SVG and PNG."""
    for name, figure in plots(records):
        save_plot(figure, folder, name)


def plots(records: Sequence[Record]) -> Iterator[tuple[str, "Figure"]]:
    """Draw every trace; prompt lengths at the memory size in the middle of the sweep."""
    for trace in dict.fromkeys(r["trace"] for r in records):
        own = [r for r in records if r["trace"] == trace]
        yield f"{trace}-by-memory", by_memory(own, trace)
        sizes = sorted({r["memory_bytes"] for r in own})
        middle = sizes[len(sizes) // 2]
        yield f"{trace}-by-length", by_length([r for r in own if r["memory_bytes"] == middle], trace)


def by_memory(records: Sequence[Record], trace: str) -> "Figure":
    """Draw a line for each policy."""
    lines = []
    for policy in _policies(records):
        own = sorted((r["memory_bytes"] / 1e9, r["hit_rate"]) for r in records if r["policy"] == policy)
        lines.append(Line(policy, [x for x, _ in own], [y for _, y in own]))
    return line_plot(
        lines,
        f"Prefix cache hit rate by memory: {trace}",
        "memory for sequences and cached prefixes, GB",
        "cached share of prompt tokens",
        log_x=True,
        percent=True,
    )


def by_length(records: Sequence[Record], trace: str) -> "Figure":
    """Draw a group of bars for each bin of prompt lengths."""
    named = {own["tokens_each"] for r in records for own in r["bins"]}
    groups = [name for number in range(len(EDGES) + 1) if (name := bin_name(number)) in named]
    series = []
    for policy in _policies(records):
        (record,) = (r for r in records if r["policy"] == policy)
        rates = {own["tokens_each"]: own["hit_rate"] for own in record["bins"]}
        series.append(Bars(policy, [rates.get(group) for group in groups]))
    return bar_plot(
        groups,
        series,
        f"Prefix cache hit rate by prompt length: {trace}, {records[0]['memory_bytes'] / 1e9:g} GB",
        "cached share of prompt tokens",
        shown="{:.0%}",
    )


def _policies(records: Sequence[Record]) -> list[str]:
    """Return the policies that cache anything, in the table's order."""
    return list(dict.fromkeys(r["policy"] for r in records if r["policy"] != "none"))
