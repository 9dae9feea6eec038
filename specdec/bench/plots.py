"""Line and bar plots by matplotlib, saved as SVG and PNG or as SVG inside a page.

matplotlib is imported when a plot is drawn. Figures are built without pyplot, which keeps global state.
"""

import importlib.util
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PALETTE = ("#1863bd", "#b8562f", "#1f9a87", "#683270", "#bf8600", "#2f373d")
"""Distinguishable with colour vision deficiencies; contrast to white at least 3:1."""
NUM_COLOURS = len(PALETTE)
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^DvP"
MARKED = 24
"""Maximum points of a line with markers."""
WIDTH = 7.6
"""Figure width, in inches."""

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class LineSeries:
    """One series; None and NaN leave gaps. `colour` and `dash` count from 0 and default to the position."""

    name: str
    x: Values
    y: Values
    colour: int | None = None
    dash: int | None = None


@dataclass(frozen=True, slots=True)
class BarSeries:
    """One series: a value per group, and the ends of its error bar. None leaves a bar out."""

    name: str
    values: Values
    low: Values | None = None
    high: Values | None = None


def require_matplotlib() -> None:
    """Raise if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--out: its plots need matplotlib, not installed here; run: pip install 'specdec[bench]'",
            field="out",
        )


def new_figure(title: str, height: float, legend: Sequence[str] = ()) -> "Figure":
    """Return an empty figure with space for `height` inches of plot and a legend of these names."""
    require_matplotlib()
    from matplotlib.figure import Figure

    lines = textwrap.wrap(plain_text(title), 70)
    rows = -(-len(legend) // _columns(legend))
    figure = Figure(figsize=(WIDTH, height + 0.25 * (len(lines) + rows)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize="large")
    return figure


def line_plot(
    lines: Sequence[LineSeries], title: str, x_label: str, y_label: str, *, percent: bool = False
) -> "Figure":
    """Draw lines on common axes: y from 0 to 100 % if `percent`."""
    figure = new_figure(title, 4.0, [line.name for line in lines])
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes = figure.subplots()
    pairs = [pair for line in lines for pair in zip(line.x, line.y, strict=True)]
    xs = sorted({x for x, y in pairs if x is not None and math.isfinite(x) and _drawn(y)})
    handles: list[Line2D] = []
    for position, line in enumerate(lines):
        colour = position if line.colour is None else line.colour
        dash = position // NUM_COLOURS if line.dash is None else line.dash
        marked = len(line.x) <= MARKED
        handles += axes.plot(
            _numbers(line.x),
            _numbers(line.y),
            label=plain_text(line.name),
            color=PALETTE[colour % NUM_COLOURS],
            linestyle=DASHES[dash % len(DASHES)],
            linewidth=1.6 if marked else 0.8,
            marker=MARKERS[colour % len(MARKERS)] if marked else "",
            markersize=5,
        )
    axes.set(xlabel=plain_text(x_label), ylabel=plain_text(y_label))
    axes.grid(visible=True, alpha=0.3)
    if all(float(x).is_integer() for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.set_ylim(0, 1.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if not xs:
        mark_empty(axes)
    _add_legend(figure, handles, [line.name for line in lines])
    return figure


def bar_plot(
    groups: Sequence[str],
    series: Sequence[BarSeries],
    title: str,
    x_label: str,
    *,
    shown: str = "{:g}",
    reference: float | None = None,
) -> "Figure":
    """Draw horizontal bars by group; `shown` formats their labels, `reference` is a dashed line."""
    names = [bars.name for bars in series] if len(series) > 1 else []
    figure = new_figure(title, 1.2 + len(groups) * (0.2 + 0.24 * len(series)), names)
    axes = figure.subplots()
    from matplotlib.patches import Patch

    thickness = 0.84 / max(len(series), 1)
    for i, bars in enumerate(series):
        kept = [(g, value) for g, value in enumerate(bars.values) if value is not None and _drawn(value)]
        ends = [(_reach(value, bars.low, g), _reach(value, bars.high, g)) for g, value in kept]
        drawn = axes.barh(
            [g + (i - (len(series) - 1) / 2) * thickness for g, _ in kept],
            [value for _, value in kept],
            thickness,
            xerr=[list(side) for side in zip(*ends, strict=True)] if any(map(any, ends)) else None,
            error_kw={"elinewidth": 1, "capsize": 2},
            color=PALETTE[i % NUM_COLOURS],
            label=plain_text(bars.name),
        )
        axes.bar_label(drawn, [shown.format(value) for _, value in kept], padding=4, fontsize="small")
    axes.set_yticks(range(len(groups)), [textwrap.fill(plain_text(group), 28) for group in groups])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel(plain_text(x_label))
    if reference is not None:
        axes.axvline(reference, color="black", linestyle="--", linewidth=1)
    if not any(value is not None and _drawn(value) for bars in series for value in bars.values):
        mark_empty(axes)
    handles = [Patch(color=PALETTE[i % NUM_COLOURS]) for i in range(len(names))]
    _add_legend(figure, handles, names)
    return figure


def mark_empty(axes: "Axes") -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="gray")


def plain_text(text: str) -> str:
    """Return a text on one line, escaped so that matplotlib does not parse it as mathematics."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(printable.split()).replace("$", r"\$")


def save_plot(figure: "Figure", folder: Path, name: str) -> None:
    """Write `name`.svg and `name`.png."""
    for kind in ("svg", "png"):
        (folder / f"{name}.{kind}").write_bytes(render(figure, kind))


def render(figure: "Figure", kind: str, salt: str = "specdec") -> bytes:
    """Render a figure as a file. SVG output depends only on the figure and the salt of its ids."""
    import matplotlib

    # Omit the date, and matplotlib's address.
    about = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "png": {"Software": None}}[kind]
    file = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}), warnings.catch_warnings():
        # A PNG shows boxes for missing glyphs; an SVG uses the viewer's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(file, format=kind, dpi=150, metadata=about)
    return file.getvalue()


def inline_svg(figure: "Figure", label: str) -> str:
    """Render a figure as an HTML element. Its ids depend on the label, which is for screen readers."""
    text = render(figure, "svg", salt=label).decode("utf-8")
    element = text[text.index("<svg") :]
    # Group ids repeat from plot to plot; nothing refers to them.
    element = re.sub(r'<g id="[\w.]+">', "<g>", element)
    return element.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)


def _add_legend(figure: "Figure", handles: Sequence["Artist"], names: Sequence[str]) -> None:
    if names:
        labels = [plain_text(name) for name in names]
        figure.legend(handles, labels, loc="outside lower center", ncols=_columns(names), frameon=False)


def _columns(names: Sequence[str]) -> int:
    """Return how many legend entries fit side by side."""
    return max(1, min(4, len(names), 84 // (max(map(len, names), default=0) + 8)))


def _reach(value: float, ends: Values | None, group: int) -> float:
    """Return the length of an error bar on one side."""
    end = ends[group] if ends is not None else None
    return abs(end - value) if end is not None and _drawn(end) else 0.0


def _drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _numbers(values: Values) -> list[float]:
    return [value if value is not None and math.isfinite(value) else math.nan for value in values]
