"""Grouped bars with whiskers: sideways, so that long names have room and any number of groups fits."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specdec.bench.charts.scale import Format, Scale, fit, is_drawn, number, spaced
from specdec.bench.charts.style import (
    BODY,
    NUM_COLOURS,
    PADDING,
    SMALL,
    WIDTH,
    document,
    heading,
    label,
    legend,
    line,
    paragraph,
    tag,
    text_width,
    wrap,
)

THICK, GAP, BETWEEN = 13, 3, 14
LINE_HEIGHT = 15

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Bars:
    """One series: a value for each group, and the ends of its whisker. None leaves a bar out."""

    name: str
    values: Values
    low: Values | None = None
    high: Values | None = None


@dataclass(frozen=True, slots=True)
class Bar:
    series: int
    value: float
    low: float | None
    high: float | None

    @property
    def reach(self) -> float:
        return max(self.value, self.value if self.high is None else self.high)


def bar_chart(
    groups: Sequence[str],
    series: Sequence[Bars],
    title: str,
    x_label: str,
    *,
    description: str = "",
    reference: float | None = None,
    shown: Format = number,
    width: int = WIDTH,
    alone: bool = True,
) -> str:
    """Draw each group's bars from 0 beneath each other; `reference` is the value marked by a dashed line."""
    bars = [_bars_of(i, series) for i in range(len(groups))]
    found = [bar for group in bars for bar in group]
    head, top = heading(title, width)
    if len(series) > 1:
        swatches = [(tag("rect", class_=f"f{i % NUM_COLOURS}", x=4, y=-6, width=14, height=12), one.name)
                    for i, one in enumerate(series)]  # fmt: skip
        names, top = legend(swatches, top, width)
        head += names
    names_room = min(max((text_width(g) for g in groups), default=0), 0.36 * width)
    left = PADDING + names_room + 10
    right = width - PADDING - max((text_width(shown(b.value), SMALL) for b in found), default=0) - 8
    ends = [v for b in found for v in (b.value, b.low, b.high)]
    scale = fit([0.0, *(ends or [1.0]), reference], most=7 if width >= WIDTH else 5).between(left, right)
    rows, y = [], top + 12
    for group, own in zip(groups, bars, strict=True):
        lines = wrap(group, names_room, BODY)
        height = max(len(lines) * LINE_HEIGHT, len(own) * (THICK + GAP))
        rows.append(_name(lines, group, left - 10, y, height))
        start = y + (height - len(own) * (THICK + GAP)) / 2
        for i, bar in enumerate(own):
            rows.append(_draw(bar, group, series[bar.series].name, start + i * (THICK + GAP), scale, shown))
        if not own:
            rows.append(label("no data", left + 6, y + height / 2 + 4, class_="muted small"))
        y += height + BETWEEN
    if not groups:
        rows.append(label("no data", width / 2, y + 8, class_="muted", anchor="middle"))
        y += 30
    bottom = y - BETWEEN / 2
    said, last = paragraph(x_label, left, bottom + 36, width - PADDING - left)
    body = head + _axis(scale, top, bottom, shown, reference) + "".join(rows) + said
    about = description or _describe(groups, bars, series, x_label, shown)
    return document(body, width, last + 14, title=title, description=about, alone=alone)


def _bars_of(group: int, series: Sequence[Bars]) -> list[Bar]:
    """Return a group's bars; a series without a value there takes no room."""
    found = []
    for i, one in enumerate(series):
        value, low, high = (None if v is None else v[group] for v in (one.values, one.low, one.high))
        if value is not None and is_drawn(value):
            found.append(Bar(i, value, *(v if is_drawn(v) else None for v in (low, high))))
    return found


def _name(lines: Sequence[str], whole: str, right: float, top: float, height: float) -> str:
    first = top + height / 2 - (len(lines) - 1) * LINE_HEIGHT / 2 + 4
    return "".join(
        label(text, right, first + i * LINE_HEIGHT, anchor="end", whole=whole) for i, text in enumerate(lines)
    )


def _draw(bar: Bar, group: str, name: str, top: float, scale: Scale, shown: Format) -> str:
    base, end, middle = scale.place(0), scale.place(bar.value), top + THICK / 2
    interval, whisker = "", ""
    if bar.low is not None and bar.high is not None:
        low, high = scale.place(bar.low), scale.place(bar.high)
        interval = f" ({shown(bar.low)} to {shown(bar.high)})"
        whisker = line(low, middle, high, middle, "whisker")
        whisker += "".join(line(x, middle - 3, x, middle + 3, "whisker") for x in (low, high))
    hint = tag("title", escape(", ".join(filter(None, [group, name])) + f": {shown(bar.value)}{interval}"))
    drawn = tag(
        "rect",
        hint,
        class_=f"f{bar.series % NUM_COLOURS}",
        x=round(min(base, end), 1),
        y=round(top, 1),
        width=round(abs(end - base), 1),
        height=THICK,
        data_group=group,
        data_series=name,
        data_value=bar.value,
    )
    beside = max(scale.place(bar.reach), base) + 6
    return drawn + whisker + label(shown(bar.value), beside, middle + 4, class_="small")


def _axis(scale: Scale, top: float, bottom: float, shown: Format, reference: float | None) -> str:
    parts = []
    for tick in spaced(scale, shown, text_width, 10):
        x = scale.place(tick)
        parts.append(line(x, top + 4, x, bottom, "rule"))
        parts.append(label(shown(tick), x, bottom + 16, class_="muted", anchor="middle"))
    if reference is not None:
        x = scale.place(reference)
        parts.append(
            tag("path", d=f"M{x:.1f} {top + 4:.1f}V{bottom:.1f}", class_="axis", stroke_dasharray="4 3")
        )
    return "".join(parts)


def _describe(
    groups: Sequence[str], bars: Sequence[Sequence[Bar]], series: Sequence[Bars], x_label: str, shown: Format
) -> str:
    """Say each bar in words."""
    said = [
        ", ".join(filter(None, [group, series[bar.series].name])) + f": {shown(bar.value)}"
        for group, own in zip(groups, bars, strict=True)
        for bar in own
    ]
    return f"{x_label}. " + ("; ".join(said) + "." if said else "No data.")
