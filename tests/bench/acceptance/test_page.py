"""The page and its plots: every record is shown, text is escaped, nothing is loaded or executed."""

from collections.abc import Sequence
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from specdec.bench.acceptance.names import Record, drafters, setting_key
from specdec.bench.acceptance.page import COLUMNS, page, write_page
from specdec.bench.acceptance.plots import PLOTS, acceptance_by_depth, histogram, speedup_by_shape
from tests.bench.acceptance.results import CATEGORIES, HOSTILE, result
from tests.bench.test_plots import PNG, lines_of, texts

VOID = {"meta"}


class Shown(HTMLParser):
    """A page's visible parts: the cells of its table, the tokens of its examples, the texts of its plots."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict[str, str]]] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.examples: list[list[list[Any]]] = []
        self.plots: dict[str, str] = {}
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.ids += filter(None, [own.get("id")])
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "pre":
            self.examples.append([])
        elif tag == "svg":
            self.plots[own["aria-label"]] = ""
        elif "data-origin" in own and self.stack[-1][0] == "pre":
            self.examples[-1].append(["", int(own["data-origin"])])
        if tag not in VOID:
            self.stack.append((tag, own))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.stack.pop()
        assert opened == tag

    def handle_data(self, data: str) -> None:
        tag, own = self.stack[-1] if self.stack else ("", {})
        self.words += data
        if tag in ("th", "td"):
            self.rows[-1][-1] += data
        elif "data-origin" in own and self.stack[-2][0] == "pre":
            self.examples[-1][-1][0] += data
        elif "svg" in [tag for tag, _ in self.stack]:
            self.plots[[*self.plots][-1]] += f"{data}\n"


def drafting(records: Sequence[Record], category: str) -> list[Record]:
    return [r for r in records if r["category"] == category and r["setting"]["draft"] != "none"]


def check_page(html: str, told: dict[str, Any]) -> Shown:
    """Check the table, the plots and the examples of a page against the result."""
    shown = Shown(html)
    head, *rows = shown.rows
    assert head == list(COLUMNS) and len(rows) == len(told["records"])
    for row, record in zip(rows, told["records"], strict=True):
        cells = dict(zip(head, row, strict=True))
        speedup, setting = record["speedup"], record["setting"]
        low, high = record["spread"]
        assert cells["setting"] == record["name"] and cells["category"] == record["category"]
        assert float(cells["temperature"]) == setting["temperature"]
        assert cells["acceptance length"] == f"{record['acceptance_length']:.2f} ({low:.2f} to {high:.2f})"
        assert cells["speedup"] == f"{speedup['median']:.2f} ({speedup['p10']:.2f} to {speedup['p90']:.2f})"
        assert cells["tokens/s"].startswith(f"{record['tokens_per_second']['median']:,.1f} (")
        shares = cells["accepted at depth 1, 2 …"].split()
        assert shares == [f"{share:.0%}" for share in record["per_depth"]]
        assert [int(n.replace(",", "")) for n in cells["steps that accepted 0, 1 …"].split()] == record[
            "histogram"
        ]
        for name in ("prompts", "looping", "tokens", "steps"):
            assert int(cells[name].replace(",", "")) == record[name]
        phases = [float(ms) for ms in cells["ms a step: draft, verify, commit, rest, whole"].split(", ")]
        assert phases == pytest.approx(list(record["ms_per_step"].values()), abs=0.005)
    categories = dict.fromkeys(record["category"] for record in told["records"])
    assert list(shown.plots) == [f"{name}: {category}" for category in categories for name in PLOTS]
    for label, words in shown.plots.items():
        name, _, category = label.partition(": ")
        for record in drafting(told["records"], category):
            assert record["name"] in words
            if name == "speedup-by-shape":
                assert f"{record['speedup']['median']:.2f}×" in words
    assert shown.examples == [example["pieces"] for example in told["examples"]]
    assert len(shown.ids) == len(set(shown.ids))
    assert all(str(value) in shown.words for value in told["versions"].values())
    return shown


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return result()


@pytest.fixture(scope="module")
def html(told: dict[str, Any]) -> str:
    return page(told)


def test_the_page_shows_the_results_figures(told: dict[str, Any], html: str) -> None:
    check_page(html, told)


@pytest.mark.parametrize("mutant", ["record", "value", "speedup", "origin", "token"])
def test_a_figure_that_differs_from_the_results_is_detected(
    told: dict[str, Any], html: str, mutant: str
) -> None:
    other = deepcopy(told)
    match mutant:
        case "record":
            other["records"].append(other["records"][-1])
        case "value":
            other["records"][-1]["steps"] += 1
        case "speedup":
            other["records"][3]["speedup"]["median"] += 0.01
        case "origin":
            other["examples"][0]["pieces"][1][1] += 1
        case "token":
            other["examples"][0]["pieces"][1][0] = " m"
    with pytest.raises(AssertionError):
        check_page(html, other)


def test_the_page_loads_nothing_and_runs_nothing(html: str) -> None:
    assert {"script", "link", "img", "iframe", "object", "base", "form"}.isdisjoint(Shown(html).tags)
    html = html.replace("http://www.w3.org/2000/svg", "").replace("http://www.w3.org/1999/xlink", "")
    assert not any(word in html for word in ("http:", "https:", "src=", "@import", ' href="'))
    assert html.count("url(") == html.count("url(#") and html.count('href="') == html.count('xlink:href="#')
    assert "default-src 'none'" in html


def test_hostile_texts_stay_texts() -> None:
    told = result(prompts=1)
    for record in told["records"]:
        record["name"], record["category"] = record["name"] + HOSTILE, record["category"] + HOSTILE
    told |= {"model": HOSTILE, "commit": HOSTILE, "machine": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE}
    html = page(told)
    shown = Shown(html)
    assert {"script", "b"}.isdisjoint(shown.tags)
    assert told["records"][0]["name"] in [row[0] for row in shown.rows]
    assert shown.examples == [example["pieces"] for example in told["examples"]]


def test_each_file_is_written(told: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    write_page(told, folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.keys() == {"index.html", *(f"{name}.{kind}" for name in PLOTS for kind in ("svg", "png"))}
    for name in PLOTS:
        words = "".join(ElementTree.fromstring(files[f"{name}.svg"]).itertext())
        assert all(record["name"] in words for record in drafting(told["records"], "all"))
        assert files[f"{name}.png"].startswith(PNG)


def check_depths(figure: Figure, records: Sequence[Record]) -> None:
    drawn = lines_of(figure)
    expected = {f"{r['name']}, temperature {r['setting']['temperature']:g}": r["per_depth"] for r in records}
    assert {name: y for name, (_, y) in drawn.items()} == expected
    assert all(x == list(range(1, len(x) + 1)) for x, _ in drawn.values())


def test_plots_have_every_value(told: dict[str, Any]) -> None:
    records = drafting(told["records"], CATEGORIES[0])
    check_depths(acceptance_by_depth(records), records)
    with pytest.raises(AssertionError):
        check_depths(acceptance_by_depth(records[1:]), records)
    frames = [axes for axes in histogram(records).axes if axes.get_visible()]
    assert len(frames) == len(records)
    for axes, r in zip(frames, records, strict=True):
        assert r["name"] in axes.get_title()
        shares = [bar.get_height() for bar in axes.patches]
        assert shares == pytest.approx([count / r["steps"] for count in r["histogram"]])
    widths = sorted(bar.get_width() for bar in speedup_by_shape(records).axes[0].patches)
    assert widths == sorted(r["speedup"]["median"] for r in records)


def test_missing_values_are_left_out() -> None:
    assert "no data" in texts(acceptance_by_depth([])) and "no data" in texts(histogram([]))
    told = result(prompts=1)
    told["records"][3] |= {"acceptance_length": None, "spread": None, "differing_texts": None}
    told["records"][3]["per_depth"] = []
    told["examples"] = []
    shown = Shown(page(told))
    cells = dict(zip(COLUMNS, shown.rows[4], strict=True))
    assert cells["acceptance length"] == cells["differing texts"] == "–" and "No examples." in shown.words


def test_settings_with_equal_names_are_distinguished() -> None:
    shapes = [
        {"draft": "mtp", "draft_noise": noise, "temperature": 1.0, "batch": b}
        for noise in (True, False)
        for b in (1, 8)
    ]
    records = [{"name": "mtp 4x1", "setting": shape} for shape in shapes]
    named = drafters(records)
    assert list(named) == [setting_key(record) for record in records]
    assert list(named.values()) == ["mtp 4x1, draft noise True"] * 2 + ["mtp 4x1, draft noise False"] * 2
