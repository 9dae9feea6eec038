"""The page: every figure is the result's, nothing breaks out of its place, and a browser agrees."""

import json
import math
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specdec.bench.acceptance.page import COLUMNS, page, write_page
from specdec.bench.acceptance.pictures import PICTURES, drafters, setting_key
from tests.bench.acceptance.results import HOSTILE, result
from tests.server.browser import dom

VOID = {"meta", "input", "br", "link"}
SVG = "{http://www.w3.org/2000/svg}"


class Shown(HTMLParser):
    """What a page shows: each row's figures, each example's tokens, the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict[str, str]]] = []
        self.figures: dict[tuple[int, str], float] = {}
        self.bars: list[tuple[str, dict[str, str]]] = []
        self.examples: list[list[list[Any]]] = []
        self.texts: dict[str, list[str]] = {}
        self.ids: list[str] = []
        self.sort_buttons = 0
        self.panel = ""
        self.root: dict[str, str] = {}
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = {name: value or "" for name, value in attrs}
        self.root = own if tag == "html" else self.root
        self.ids += filter(None, [own.get("id")])
        self.panel = own.get("data-category", self.panel) if own.get("class") == "panel" else self.panel
        if tag == "data":
            row = next(a for t, a in reversed(self.stack) if t == "tr")
            self.figures[int(row["data-record"]), own["data-field"]] = float(own["value"])
        if "data-value" in own and "wide" in [a.get("class") for _, a in self.stack]:
            self.bars.append((self.panel, own))
        if tag == "pre" and own.get("class") == "example":
            self.examples.append([])
        if "data-origin" in own and "tabindex" in own:
            self.examples[-1].append(["", int(own["data-origin"])])
        self.sort_buttons += tag == "button" and self.stack[-1][0] == "th"
        if tag not in VOID:
            self.stack.append((tag, own))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.stack.pop()
        assert opened == tag

    def handle_data(self, data: str) -> None:
        tag, own = self.stack[-1] if self.stack else ("", {})
        self.texts.setdefault(own.get("id") or tag, []).append(data)
        if "data-origin" in own and "tabindex" in own:
            self.examples[-1][-1][0] += data


def leaves(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the figures of a record that its row must show."""
    for column in COLUMNS:
        for path in column.paths:
            value: Any = record
            for key in path.removesuffix(".*").split("."):
                value = value[int(key)] if isinstance(value, list) else value[key]
            many = enumerate(value) if path.endswith("*") else [(None, value)]
            yield from ((path.replace("*", str(i)), v) for i, v in many if v is not None)


def check_figures(html: str, told: dict[str, Any]) -> Shown:
    """Check every figure of a page's table, pictures and examples against the result's."""
    shown = Shown(html)
    assert shown.figures == {
        (i, path): value for i, record in enumerate(told["records"]) for path, value in leaves(record)
    }
    names = drafters(told["records"])
    drawn = sorted((panel, float(own["data-value"])) for panel, own in shown.bars)
    assert drawn == sorted(
        (record["category"], value)
        for record in told["records"]
        if record["setting"]["draft"] != "none"
        for value in (*record["per_depth"], *record["histogram"], record["speedup"]["median"])
    )
    groups = {
        (p, o["data-group"], o["data-series"]): o["data-value"] for p, o in shown.bars if "data-group" in o
    }
    for record in told["records"]:
        if record["setting"]["draft"] != "none":
            series = f"temperature {record['setting']['temperature']:g}"
            key = (record["category"], names[setting_key(record)], series)
            assert float(groups[key]) == record["speedup"]["median"]
    assert shown.examples == [example["pieces"] for example in told["examples"]]
    assert json.loads("".join(shown.texts["result"])) == told
    assert "".join(shown.texts["title"]).startswith("Acceptance: tiny")
    assert len(shown.ids) == len(set(shown.ids))
    return shown


def test_the_page_shows_the_results_figures() -> None:
    told = result()
    shown = check_figures(page(told), told)
    assert len(shown.texts["script"]) == 1 and shown.sort_buttons == 0


@pytest.mark.parametrize("spoil", ["value", "origin", "text"])
def test_a_figure_that_is_not_the_results_is_found(spoil: str) -> None:
    told = result()
    html = page(told)
    before, after = {
        "value": ('data-field="steps" value="', 'data-field="steps" value="1'),
        "origin": ('data-origin="2" tabindex', 'data-origin="3" tabindex'),
        "text": ('tabindex="-1"> n<', 'tabindex="-1"> m<'),
    }[spoil]
    assert before in html
    with pytest.raises(AssertionError):
        check_figures(html.replace(before, after, 1), told)


def test_the_page_needs_no_network() -> None:
    html = page(result()).replace("http://www.w3.org/2000/svg", "")
    assert not any(word in html for word in ("http:", "https:", "src=", "href=", "@import", "url("))
    assert "default-src 'none'" in html


def test_hostile_texts_stay_texts() -> None:
    told = result()
    for record in told["records"]:
        record["name"], record["category"] = record["name"] + HOSTILE, record["category"] + HOSTILE
    told |= {"model": HOSTILE, "commit": HOSTILE, "machine": {HOSTILE: HOSTILE}, HOSTILE: HOSTILE}
    html = page(told)
    shown = Shown(html)
    assert html.count("<script") == 2 and html.count("</script") == 2 and "<b>" not in html
    assert json.loads("".join(shown.texts["result"])) == told


def test_each_file_is_written_and_a_picture_is_whole_alone(tmp_path: Path) -> None:
    told = result()
    write_page(told, tmp_path / "new" / "folder")
    found = {path.name: path.read_text("utf-8") for path in (tmp_path / "new" / "folder").iterdir()}
    assert set(found) == {"index.html", *(f"{name}.svg" for name in PICTURES)}
    everything = [r for r in told["records"] if r["category"] == "all" and r["setting"]["draft"] != "none"]
    for name, of in (
        ("acceptance-by-depth", lambda r: r["per_depth"]),
        ("speedup-by-shape", lambda r: [r["speedup"]["median"]]),
        ("histogram", lambda r: r["histogram"]),
    ):
        nodes = ElementTree.fromstring(found[f"{name}.svg"]).iter()
        drawn = sorted(float(n.get("data-value", "")) for n in nodes if n.get("data-value"))
        assert drawn == sorted(value for record in everything for value in of(record))


def test_the_example_that_stands_open_is_one_with_drafts() -> None:
    plain = {"setting": "none", "category": "code", "prompt": "x", "pieces": [["a", 0], ["b", 0]]}
    drafted = plain | {"setting": "mtp 4x1", "pieces": [["a", 0], ["b", 1]]}
    for examples, opened in (
        ([plain, drafted], "mtp 4x1"),
        ([plain, plain], "none"),
        ([drafted, plain], "mtp 4x1"),
    ):
        html = page(result(prompts=1) | {"examples": examples})
        (found,) = re.findall(r"<details open><summary>([^,<]*)", html)
        assert found == opened


def test_what_is_missing_is_left_open() -> None:
    bare = {"benchmark": "acceptance", "records": [{"name": "mtp 4x1"}, {"setting": {"draft": "none"}}]}
    assert Shown(page(bare)).figures == {}
    told = result(prompts=1)
    told["records"][3] |= {
        "speedup": {"median": None},
        "per_depth": [0.5, None],
        "seconds": math.nan,
        "spread": [],
    }
    shown = Shown(page(told)).figures
    assert [
        path for row, path in shown if row == 3 and path.split(".")[0] in ("speedup", "per_depth", "spread")
    ] == ["per_depth.0"]
    assert "".join(Shown(page(told)).texts["result"]).count("NaN") == 0


def test_settings_of_one_name_are_told_apart() -> None:
    shapes = [
        {"draft": "mtp", "draft_noise": noise, "temperature": 1.0, "batch": b}
        for noise in (True, False)
        for b in (1, 8)
    ]
    named = drafters([{"name": "mtp 4x1", "setting": shape} for shape in shapes])
    assert list(named.values()) == ["mtp 4x1, draft noise True"] * 2 + ["mtp 4x1, draft noise False"] * 2


PROBE = """<script>{
const told = document.documentElement.dataset;
const all = (what) => [...document.querySelectorAll(what)];
const rows = () => all("#records tbody tr").map((row) => row.dataset.record).join(" ");
const heads = all("#records th button");
const click = (name) => heads.find((head) => head.textContent === name).click();
click("acceptance length"); told.down = rows();
click("acceptance length"); told.up = rows();
click("category"); told.text = rows();
const shown = (panel) => getComputedStyle(panel).display !== "none";
const panels = () => all(".panel").filter(shown).map((panel) => panel.dataset.category);
told.before = panels();
document.querySelector("label[for=show1]").click(); told.after = panels();
const tokens = [...document.querySelector("pre.example").querySelectorAll(".from")];
tokens[0].focus();
tokens[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
told.focus = tokens.indexOf(document.activeElement);
told.hint = getComputedStyle(document.activeElement, "::after").content;
const inspect = document.getElementById("inspect");
inspect.addEventListener("toggle", () => { told.inspected = inspect.lastChild.textContent.length; });
inspect.open = true;
}</script></body>"""


def test_a_browser_shows_the_same_figures_and_the_page_works_in_it(tmp_path: Path) -> None:
    told, path = result(), tmp_path / "index.html"
    path.write_text(page(told).replace("</body>", PROBE), "utf-8")
    shown = check_figures(dom(path, tmp_path / "profile"), told)
    seen = shown.root
    assert shown.sort_buttons == 4 + len(COLUMNS)
    lengths = [record["acceptance_length"] for record in told["records"]]
    down, up, text = ([int(i) for i in seen[f"data-{name}"].split()] for name in ("down", "up", "text"))
    assert [lengths[i] for i in down] == sorted(lengths, reverse=True)
    assert [lengths[i] for i in up] == sorted(lengths)
    categories = [record["category"] for record in told["records"]]
    assert [categories[i] for i in text] == sorted(categories)
    assert (seen["data-before"], seen["data-after"]) == ("all", "code")
    assert seen["data-focus"] == "1" and seen["data-hint"] == '"drafted at depth 1"'
    assert int(seen["data-inspected"]) > len(json.dumps(told))


NARROW = """<script>
const root = document.documentElement, told = parent.document.documentElement.dataset;
told.width = root.clientWidth;
told.overflow = root.scrollWidth - root.clientWidth;
const wide = (svg) => svg.getBoundingClientRect().width > 0;
told.pictures = [...document.querySelectorAll("svg")].filter(wide).map((svg) => svg.getAttribute("width"));
</script></body>"""


def test_on_a_phone_nothing_but_the_table_is_wider_than_the_screen(tmp_path: Path) -> None:
    inner = escape(page(result()).replace("</body>", NARROW))
    path = tmp_path / "phone.html"
    frame = f'<iframe width="390" height="800" style="border:0" srcdoc="{inner}"></iframe>'
    path.write_text(f"<!doctype html><html><body>{frame}</body></html>", "utf-8")
    seen = Shown(dom(path, tmp_path / "profile")).root
    assert (seen["data-width"], seen["data-overflow"]) == ("390", "0")
    assert seen["data-pictures"] == ",".join(["380"] * len(PICTURES))
