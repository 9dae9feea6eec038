"""Line charts: several series, gaps where a value is missing, shades, any number of points."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median_low

from specdec.bench.charts.scale import Format, Scale, fit, is_drawn, number, percent, spaced
from specdec.bench.charts.style import (
    DASHES,
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
)

COLUMNS = 400
"""A line of more points is drawn as the median of each of so many columns."""
THINNED = "line: median of each column; shade: from the least to the most"
MARKED = 24
"""Points up to which each gets a marker."""
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.5 -3.5h7v7h-7z",
    "M0 -4.6l4.6 8h-9.2z",
    "M0 -5l5 5l-5 5l-5 -5z",
    "M0 4.6l4.6 -8h-9.2z",
    "M-4.5 -1.5h3v-3h3v3h3v3h-3v3h-3v-3h-3z",
)

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One series; None, NaN and infinities leave gaps. `low` and `high` bound its shade.

    `colour` and `dash` count from 0; left out, they follow from the place in the list.
    """

    name: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    colour: int | None = None
    dash: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float
    high: float


def line_chart(
    series: Sequence[Line],
    title: str,
    x_label: str,
    y_label: str,
    *,
    description: str = "",
    log_x: bool = False,
    log_y: bool = False,
    y_percent: bool = False,
    y_range: tuple[float, float] | None = None,
    width: int = WIDTH,
    height: int = 300,
    alone: bool = True,
) -> str:
    """Draw lines over a common pair of axes; `height` is the plot's, `alone` brings the style along."""
    runs = [list(_runs(one, log_x=log_x, log_y=log_y)) for one in series]
    points = [p for found in runs for run in found for p in run]
    shown: Format = percent if y_percent else number
    y_values = [v for p in points for v in (p.y, p.low, p.high)]
    y_scale = fit([*y_values, *(y_range or ())], log=log_y, most=7)
    left = PADDING + max(text_width(shown(t)) for t in y_scale.ticks) + 8
    right = width - PADDING - 12
    xs = [p.x for p in points]
    whole = all(float(x).is_integer() for x in xs)
    x_scale = fit(xs, log=log_x, most=11, whole=whole, tight=True).between(left, right)
    drawn = [[_thin(run, x_scale) for run in found] for found in runs]
    marked = [sum(map(len, found)) <= MARKED for found in drawn]
    body, top = heading(title, width)
    if any(one.name for one in series):
        swatches = [(_swatch(i, one, marked=marked[i]), one.name) for i, one in enumerate(series)]
        names, top = legend(swatches, top, width)
        body += names
    about, last = paragraph(y_label, PADDING, top + 14, width - 2 * PADDING)
    body, top = body + about, last + 16
    bottom = top + height
    y_scale = y_scale.between(bottom, top)
    body += _axes(x_scale, y_scale, shown)
    about, end = paragraph(x_label, left, bottom + 38, right - left)
    body += about
    for i, (one, found) in enumerate(zip(series, drawn, strict=True)):
        body += _draw(i, one, found, x_scale, y_scale, marked=marked[i])
    if not points:
        body += label("no data", (left + right) / 2, (top + bottom) / 2, class_="muted", anchor="middle")
    if any(len(run) > COLUMNS for found in runs for run in found):
        room = width - 2 * PADDING
        about, end = paragraph(THINNED, PADDING, end + 20, room, size=SMALL, class_="muted small")
        body += about
    about = description or _describe(series, runs, x_label, y_label, shown)
    return document(body, width, end + 14, title=title, description=about, alone=alone)


def _runs(one: Line, *, log_x: bool, log_y: bool) -> Iterator[list[Point]]:
    """Yield the stretches of points between gaps."""
    run: list[Point] = []
    low, high = (one.y if v is None else v for v in (one.low, one.high))
    for x, y, below, above in zip(one.x, one.y, low, high, strict=True):
        if x is not None and y is not None and is_drawn(x, log=log_x) and is_drawn(y, log=log_y):
            edges = [v if v is not None and is_drawn(v, log=log_y) else y for v in (below, above)]
            run.append(Point(x, y, *edges))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _thin(run: list[Point], x_scale: Scale) -> list[Point]:
    """Put the points of a column of the picture into one, which keeps their extremes."""
    if len(run) <= COLUMNS:
        return run
    columns: dict[int, list[Point]] = {}
    span = x_scale.end - x_scale.start
    for p in run:
        column = int((x_scale.place(p.x) - x_scale.start) / span * COLUMNS)
        columns.setdefault(min(column, COLUMNS - 1), []).append(p)
    return [
        Point(
            median_low(p.x for p in own),
            median_low(p.y for p in own),
            min(min(p.low, p.y) for p in own),
            max(max(p.high, p.y) for p in own),
        )
        for own in columns.values()
    ]


def _axes(x_scale: Scale, y_scale: Scale, shown: Format) -> str:
    left, right, bottom = x_scale.start, x_scale.end, y_scale.start
    parts = []
    for tick in y_scale.ticks:
        y = y_scale.place(tick)
        parts.append(line(left, y, right, y, "rule"))
        parts.append(label(shown(tick), left - 8, y + 4, class_="muted", anchor="end"))
    parts.append(line(left, bottom, right, bottom, "axis"))
    for tick in spaced(x_scale, number, text_width, 10):
        x = x_scale.place(tick)
        parts.append(line(x, bottom, x, bottom + 4, "axis"))
        parts.append(label(number(tick), x, bottom + 18, class_="muted", anchor="middle"))
    return "".join(parts)


def _look(index: int, one: Line) -> tuple[int, str, str]:
    """Return a series' colour, the dashes of its line and the shape of its markers."""
    colour = index % NUM_COLOURS if one.colour is None else one.colour % NUM_COLOURS
    dash = index // NUM_COLOURS if one.dash is None else one.dash
    return colour, DASHES[dash % len(DASHES)], MARKERS[colour % len(MARKERS)]


def _swatch(index: int, one: Line, *, marked: bool) -> str:
    colour, dash, marker = _look(index, one)
    stroke = tag("path", d="M0 0h22", class_=f"line s{colour}", stroke_dasharray=dash)
    return stroke + tag("path", d=marker, class_=f"f{colour}", transform="translate(11 0)") * marked


def _draw(
    index: int, one: Line, runs: list[list[Point]], x_scale: Scale, y_scale: Scale, *, marked: bool
) -> str:
    colour, dash, marker = _look(index, one)
    parts = []
    for run in runs:
        xs = [x_scale.place(p.x) for p in run]
        if any(p.low < p.high for p in run):
            edge = [(x, y_scale.place(p.high)) for x, p in zip(xs, run, strict=True)]
            edge += [(x, y_scale.place(p.low)) for x, p in zip(reversed(xs), reversed(run), strict=True)]
            parts.append(tag("path", d=f"{_path(edge)}z", class_=f"band f{colour}"))
        places = [(x, y_scale.place(p.y)) for x, p in zip(xs, run, strict=True)]
        # A path of one point shows through its round ends alone.
        stroke = _path(places if len(places) > 1 else places * 2)
        parts.append(tag("path", d=stroke, class_=f"line s{colour}", stroke_dasharray=dash))
        for (x, y), p in zip(places, run, strict=True) if marked else ():
            hint = tag("title", escape(f"{one.name}: {number(p.y)} at {number(p.x)}".removeprefix(": ")))
            place = f"translate({x:.1f} {y:.1f})"
            parts.append(
                tag("path", hint, d=marker, class_=f"f{colour}", transform=place, data_x=p.x, data_value=p.y)
            )
    return tag("g", "".join(parts), data_series=one.name)


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _describe(
    series: Sequence[Line], runs: list[list[list[Point]]], x_label: str, y_label: str, shown: Format
) -> str:
    """Say in words where each line begins and ends."""
    ends = [
        f"{one.name}: {shown(found[0][0].y)} to {shown(found[-1][-1].y)}".removeprefix(": ")
        for one, found in zip(series, runs, strict=True)
        if found
    ]
    return f"{y_label} by {x_label}. " + ("; ".join(ends) + "." if ends else "No data.")
