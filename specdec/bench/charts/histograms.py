"""Histograms beside each other: one small frame each, on axes that all share."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specdec.bench.charts.scale import Scale, fit, number, percent, spaced
from specdec.bench.charts.style import (
    PADDING,
    SMALL,
    WIDTH,
    document,
    heading,
    label,
    line,
    paragraph,
    tag,
    text_width,
    wrap,
)

NARROWEST, PLOT, BETWEEN = 220, 96, 18
LINE_HEIGHT = 15


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each of 0, 1, 2 … occurred."""

    name: str
    counts: Sequence[int]


def histogram_chart(
    histograms: Sequence[Histogram],
    title: str,
    x_label: str,
    *,
    description: str = "",
    width: int = WIDTH,
    alone: bool = True,
) -> str:
    """Draw shares of each histogram's own total, so that runs of different lengths compare."""
    head, top = heading(title, width)
    shares = [_shares(one.counts) for one in histograms]
    y_scale = fit([0.0, *(s for own in shares for s in own)], most=4)
    margin = max(text_width(percent(t), SMALL) for t in y_scale.ticks) + 6
    room = width - 2 * PADDING
    columns = max(int((room + BETWEEN) / (NARROWEST + BETWEEN)), 2)
    across = (room + BETWEEN) / columns
    names = [wrap(one.name, across - BETWEEN) for one in histograms]
    above = LINE_HEIGHT * max(map(len, names), default=1) + 8
    down = above + PLOT + 34
    last = max([len(one.counts) for one in histograms] + [1]) - 1
    parts = [head]
    for i, (one, own) in enumerate(zip(histograms, shares, strict=True)):
        left, y = PADDING + i % columns * across, top + i // columns * down
        frame = Scale(-0.5, last + 0.5, tuple(float(n) for n in range(last + 1)))
        x_scale = frame.between(left + margin, left + across - BETWEEN)
        parts += [
            label(text, left, y + 11 + n * LINE_HEIGHT, whole=one.name) for n, text in enumerate(names[i])
        ]
        parts.append(_frame(one, own, x_scale, y_scale.between(y + above + PLOT, y + above)))
    rows = -(-len(histograms) // columns)
    bottom = top + max(rows * down, 60)
    if not histograms:
        parts.append(label("no data", width / 2, top + 34, class_="muted", anchor="middle"))
    said, bottom = paragraph(x_label, PADDING, bottom, room)
    parts.append(said)
    about = description or _describe(histograms, x_label)
    return document("".join(parts), width, bottom + 16, title=title, description=about, alone=alone)


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [n / total if total else 0.0 for n in counts]


def _frame(one: Histogram, shares: Sequence[float], x_scale: Scale, y_scale: Scale) -> str:
    left, right, bottom = x_scale.start, x_scale.end, y_scale.start
    parts = []
    for tick in y_scale.ticks:
        y = y_scale.place(tick)
        parts.append(line(left, y, right, y, "rule"))
        parts.append(label(percent(tick), left - 6, y + 4, class_="muted small", anchor="end"))
    wide = (right - left) / len(x_scale.ticks)
    for n, (count, share) in enumerate(zip(one.counts, shares, strict=True)):
        hint = tag("title", escape(f"{one.name}: {n} in {count:,} ({percent(share)})"))
        parts.append(
            tag(
                "rect",
                hint,
                class_="f0",
                x=round(x_scale.place(n) - 0.4 * wide, 1),
                y=round(y_scale.place(share), 1),
                width=round(0.8 * wide, 1),
                height=round(bottom - y_scale.place(share), 1),
                data_name=one.name,
                data_x=n,
                data_value=count,
            )
        )
    parts.append(line(left, bottom, right, bottom, "axis"))
    for tick in spaced(x_scale, number, lambda text: text_width(text, SMALL), 6):
        at = x_scale.place(tick)
        parts.append(label(number(tick), at, bottom + 14, class_="muted small", anchor="middle"))
    if not sum(one.counts):
        middle = (left + right) / 2
        parts.append(label("no data", middle, bottom - PLOT / 2, class_="muted small", anchor="middle"))
    return "".join(parts)


def _describe(histograms: Sequence[Histogram], x_label: str) -> str:
    """Say every count in words."""
    said = [f"{one.name}: {', '.join(map(str, one.counts)) or 'none'}" for one in histograms]
    return f"{x_label}, from 0. " + ("; ".join(said) + "." if said else "No data.")
