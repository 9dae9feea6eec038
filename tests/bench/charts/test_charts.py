"""Pictures: whole, named for all readers, true to their figures, and legible in both lights."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specdec.bench.charts import Bars, Histogram, Line, bar_chart, histogram_chart, line_chart
from specdec.bench.charts.lines import COLUMNS
from specdec.bench.charts.style import label
from tests.server.browser import dom

SVG = "{http://www.w3.org/2000/svg}"
NAN = math.nan
LONG = "a drafter whose name was too short for its author until it filled a line and a half, temperature 1"
HOSTILE = '</text><script>alert(1)</script> & "it\'s" ]]>'


def parse(picture: str) -> ElementTree.Element:
    """Read a picture as the XML that it has to be alone, and check what every picture owes its readers."""
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    assert root[0].tag == f"{SVG}title" and root[0].text
    assert root[1].tag == f"{SVG}desc" and root[1].text
    assert "nan" not in picture and "inf" not in picture.replace("information", "")
    return root


def raw(root: ElementTree.Element) -> list[float]:
    return [float(node.get("data-value", "")) for node in root.iter() if node.get("data-value")]


def paths(root: ElementTree.Element, kind: str) -> list[list[tuple[float, float]]]:
    """Return the corners of a chart's paths, those of the legend left out."""
    found = []
    for group in root.iter(f"{SVG}g"):
        if group.get("data-series") is None:
            continue
        for node in group.iter(f"{SVG}path"):
            if kind in (node.get("class") or "").split():
                corners = re.findall(r"(-?[\d.]+) (-?[\d.]+)", node.get("d") or "")
                found.append([(float(x), float(y)) for x, y in corners])
    return found


def test_gaps_break_a_line_and_leave_no_marker() -> None:
    y = [0.9, 0.8, None, 0.6, NAN, 0.4, math.inf, 0.2, 0.1]
    root = parse(line_chart([Line("mtp", range(1, 10), y)], "t", "x", "y"))
    assert [len(path) for path in paths(root, "line")] == [2, 2, 2, 2]
    assert raw(root) == [0.9, 0.8, 0.6, 0.4, 0.2, 0.1]


def test_places_rise_with_values_on_both_kinds_of_axis() -> None:
    for log in (False, True):
        root = parse(line_chart([Line("s", [1, 10, 100], [1, 10, 100])], "t", "x", "y", log_x=log, log_y=log))
        (corners,) = paths(root, "line")
        (x0, y0), (x1, y1), (x2, y2) = corners
        assert x0 < x1 < x2 and y0 > y1 > y2
        assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.3) == log
        assert math.isclose(y0 - y1, y1 - y2, abs_tol=0.3) == log


def test_what_has_no_logarithm_is_a_gap() -> None:
    root = parse(line_chart([Line("loss", [0, 1, 2, 3], [5, 0, -1, 2])], "t", "x", "y", log_y=True))
    assert raw(root) == [5, 2]


def test_thousands_of_points_are_thinned_and_no_spike_is_lost() -> None:
    num = 20_000
    losses = [2 + 8 * math.exp(-i / 900) + 0.1 * math.sin(i * i) for i in range(num)]
    losses[12_345] = 10.0
    smooth = line_chart([Line("loss", range(num), losses)], "Loss", "step", "nats")
    root = parse(smooth)
    (line,) = paths(root, "line")
    (band,) = paths(root, "band")
    assert COLUMNS * 0.9 < len(line) <= COLUMNS
    assert len(smooth) < 60_000
    spike = line[0][0] + (line[-1][0] - line[0][0]) * 12_345 / num
    highest = min(y for x, y in band if abs(x - spike) < 3)
    beside = min(y for x, y in band if 10 < abs(x - spike) < 20)
    assert highest < beside - 100
    assert "shade" in "".join(root.itertext())


def test_a_shade_lies_around_its_line() -> None:
    lines = [Line("s", [1, 2, 3], [2, 3, 4], low=[1, None, 3], high=[3, 4, 5]), Line("t", [1, 2], [1, 1])]
    root = parse(line_chart(lines, "t", "x", "y"))
    (band,), line = paths(root, "band"), paths(root, "line")[0]
    upper, lower = band[:3], band[:2:-1]
    assert [a[1] < b[1] for a, b in zip(upper, line, strict=True)] == [True] * 3
    assert [a[1] > b[1] for a, b in zip(lower, line, strict=True)] == [True, False, True]


@pytest.mark.parametrize(
    "picture",
    [
        line_chart([], "t", "x", "y"),
        line_chart([Line("none", [], []), Line("nothing", [1, 2], [None, NAN])], "t", "x", "y", log_y=True),
        line_chart([Line("one", [1], [0.5])], "t", "x", "y", y_percent=True),
        bar_chart([], [], "t", "x"),
        bar_chart(["a"], [Bars("s", [None])], "t", "x"),
        histogram_chart([], "t", "x"),
        histogram_chart([Histogram("a", []), Histogram("b", [0, 0])], "t", "x"),
    ],
)
def test_nothing_to_show_says_so(picture: str) -> None:
    root = parse(picture)
    assert "no data" in "".join(root.itertext()) or raw(root) == [0.5]


def test_bars_hold_their_values_and_leave_out_what_is_missing() -> None:
    series = [
        Bars("greedy", [1.5, 2.0, None], [1.4, 1.8, None], [1.6, 2.3, None]),
        Bars("sampled", [1.1, NAN, 0.5], [None] * 3, [None] * 3),
    ]
    root = parse(bar_chart(["a", "b", "c"], series, "t", "x", reference=1.0))
    bars = {(b.get("data-group"), b.get("data-series")): b for b in root.iter() if b.get("data-group")}
    assert {key: float(b.get("data-value", "")) for key, b in bars.items()} == {
        ("a", "greedy"): 1.5, ("a", "sampled"): 1.1, ("b", "greedy"): 2.0, ("c", "sampled"): 0.5,
    }  # fmt: skip
    lengths = {key: float(b.get("width", "")) for key, b in bars.items()}
    assert lengths["a", "greedy"] / lengths["c", "sampled"] == pytest.approx(3, rel=0.01)
    whiskers = [n for n in root.iter(f"{SVG}line") if n.get("class") == "whisker"]
    assert len(whiskers) == 2 * 3


def test_histograms_show_shares_of_their_own_total() -> None:
    root = parse(histogram_chart([Histogram("few", [1, 3]), Histogram("many", [100, 300])], "t", "x"))
    assert raw(root) == [1, 3, 100, 300]
    heights = [float(n.get("height", "")) for n in root.iter(f"{SVG}rect") if n.get("data-value")]
    assert heights[:2] == heights[2:]


def test_texts_cannot_leave_their_place() -> None:
    for picture in (
        line_chart([Line(HOSTILE, [1], [1])], HOSTILE, HOSTILE, HOSTILE, description=HOSTILE),
        bar_chart([HOSTILE], [Bars(HOSTILE, [1]), Bars("b", [2])], HOSTILE, HOSTILE),
        histogram_chart([Histogram(HOSTILE, [1])], HOSTILE, HOSTILE),
    ):
        assert not list(parse(picture).iter(f"{SVG}script"))


def test_only_a_picture_alone_brings_its_style() -> None:
    alone, shown = (line_chart([], "t", "x", "y", alone=alone) for alone in (True, False))
    assert "prefers-color-scheme:dark" in alone and "<style" not in shown


def crowded(width: int) -> list[str]:
    lines = [Line(f"{LONG} {i}", [1, 2, 9999], [0.1 * i, 0.5, 0.9]) for i in range(8)]
    groups = [f"{LONG} {i}" if i % 2 else "none" for i in range(5)]
    series = [Bars(f"{LONG}, {name}", [123456.0 * i for i in range(5)]) for name in "ab"]
    return [
        line_chart(lines, LONG, LONG, LONG, y_percent=True, width=width),
        line_chart([Line("", [1e6, 9e6], [1e-7, 1e7])], LONG, "x", "y", log_x=True, log_y=True, width=width),
        bar_chart(groups, series, LONG, LONG, reference=1.0, width=width),
        histogram_chart([Histogram(f"{LONG} {i}", [5] * 40) for i in range(5)], LONG, LONG, width=width),
    ]


CLASHES = """<script>
const found = [];
const box = (node) => [node.lastChild.data, node.getBoundingClientRect()];
const apart = (a, b) => Math.max(a.left - b.right, b.left - a.right) >= -1
  || Math.max(a.top - b.bottom, b.top - a.bottom) >= -3;
for (const [i, svg] of document.querySelectorAll("svg").entries()) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(box);
  for (const [name, a] of texts) {
    if (a.left < frame.left || a.right > frame.right || a.top < frame.top || a.bottom > frame.bottom)
      found.push(`${i}: ${name} leaves the picture`);
    for (const [other, b] of texts)
      if (a !== b && !apart(a, b))
        found.push(`${i}: ${name} over ${other}`);
  }
}
document.body.replaceChildren();
document.body.textContent = `${found.length} clashes: ${found.join("; ")}`;
</script>"""


def test_no_text_lies_over_another(tmp_path: Path) -> None:
    pictures = [*crowded(760), *crowded(380)]
    spoilt = pictures[-1].replace("</svg>", label("here", 20, 20) + label("off", 375, 100) + "</svg>")
    page = tmp_path / "page.html"
    shown = "".join([*pictures, spoilt, CLASHES])
    page.write_text(f"<!doctype html><meta charset=utf-8><body>{shown}", "utf-8")
    told = re.search(r"\d+ clashes: ([^<]*)", dom(page, tmp_path / "profile"))
    assert told
    found = told[1].split("; ")
    assert all(clash.startswith(f"{len(pictures)}: ") for clash in found), found
    assert any("here over" in clash for clash in found) and any("off leaves" in clash for clash in found)
