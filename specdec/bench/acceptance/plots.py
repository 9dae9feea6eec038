"""Plots of a result: acceptance rate by depth, speedup by setting, accepted draft tokens per step."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from textwrap import fill
from typing import TYPE_CHECKING, Any

from specdec.bench.acceptance.names import Record, condition, drafters, field, plain, setting_key
from specdec.bench.plots import (
    NUM_COLOURS,
    PALETTE,
    BarSeries,
    LineSeries,
    bar_plot,
    line_plot,
    mark_empty,
    new_figure,
    plain_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 3
"""Histograms per row."""


def acceptance_by_depth(records: Sequence[Record]) -> "Figure":
    """Draw a line per drafter and temperature: colour by drafter, dashes by temperature."""
    chosen, names = _smallest_batches([r for r in records if r.get("per_depth")]), drafters(records)
    shapes = list(dict.fromkeys(names[setting_key(r)] for r in chosen))
    temperatures = list(dict.fromkeys(field(r, "temperature") for r in chosen))
    lines = []
    for r in chosen:
        # Drafters that share a colour get different dashes.
        again, colour = divmod(shapes.index(names[setting_key(r)]), NUM_COLOURS)
        dash = temperatures.index(field(r, "temperature")) + len(temperatures) * again
        depths = range(1, len(r["per_depth"]) + 1)
        lines.append(LineSeries(_label(r, chosen, names), depths, r["per_depth"], colour, dash))
    return line_plot(
        lines,
        "Acceptance rate by depth",
        "depth of the draft token",
        "accepted, of drafts that reached the depth",
        percent=True,
    )


def speedup_by_shape(records: Sequence[Record]) -> "Figure":
    """Draw a group of bars per drafter, one bar per temperature and batch."""
    drafting = [r for r in records if field(r, "draft") != "none"]
    names = drafters(records)
    groups = list(dict.fromkeys(names[setting_key(r)] for r in drafting))
    found: dict[str, dict[str, Record]] = {}
    for r in drafting:
        found.setdefault(condition(r, drafting), {})[names[setting_key(r)]] = r.get("speedup") or {}
    series = [
        BarSeries(name, *([own.get(g, {}).get(part) for g in groups] for part in ("median", "p10", "p90")))
        for name, own in found.items()
    ]
    return bar_plot(
        groups,
        series,
        "Speedup",
        "tokens/s over those without drafts: median, p10 to p90",
        shown="{:.2f}×",
        reference=1.0,
    )


def histogram(records: Sequence[Record]) -> "Figure":
    """Draw a histogram per drafter and temperature, as shares of its steps."""
    chosen = _smallest_batches([r for r in records if len(r.get("histogram") or []) > 1])
    names, rows = drafters(records), max(-(-len(chosen) // ACROSS), 1)
    figure = new_figure("Accepted draft tokens per step", 1.8 * rows + 0.4)
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    grid = figure.subplots(rows, ACROSS, sharex=True, sharey=True, squeeze=False)
    for axes, r in zip_longest(grid.flat, chosen):
        if r is None:
            axes.set_visible(False)
            continue
        total = max(sum(r["histogram"]), 1)
        axes.bar(range(len(r["histogram"])), [n / total for n in r["histogram"]], color=PALETTE[0])
        axes.set_title(fill(plain_text(_label(r, chosen, names)), 30), fontsize="small")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if not chosen:
        grid[0, 0].set_visible(True)
        mark_empty(grid[0, 0])
    figure.supxlabel("accepted draft tokens", fontsize="medium")
    figure.supylabel("share of verify steps", fontsize="medium")
    return figure


PLOTS: dict[str, Callable[[Sequence[Record]], "Figure"]] = {
    "acceptance-by-depth": acceptance_by_depth,
    "speedup-by-shape": speedup_by_shape,
    "histogram": histogram,
}


def _smallest_batches(records: Sequence[Record]) -> list[Record]:
    """Return the smallest batch of each drafter and temperature: acceptance hardly depends on the batch."""
    names = drafters(records)
    kept: dict[tuple[str, Any], Record] = {}
    for r in sorted(records, key=lambda r: field(r, "batch") or 0):
        kept.setdefault((names[setting_key(r)], field(r, "temperature")), r)
    return [r for r in records if any(r is one for one in kept.values())]


def _label(record: Record, records: Sequence[Record], names: dict[str, str]) -> str:
    temperature = field(record, "temperature")
    several = len({field(r, "temperature") for r in records}) > 1
    return names[setting_key(record)] + f", temperature {plain(temperature)}" * several
