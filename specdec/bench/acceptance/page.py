"""One page that shows a result of the benchmark: pictures, all figures, texts coloured by who drafted them.

The page needs no network and no server. Every figure is an element that holds the result's own value.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from specdec.bench.acceptance.pictures import PICTURES, Record, field, plain
from specdec.bench.charts import STYLE, times
from specdec.core.stats import PHASES

NARROW = 380
"""The width of the pictures that a phone is shown."""
SHADES = 8
"""Depths that have a colour of their own; deeper ones share the last."""
OWN = "the verifier's own"
DEFINITIONS = {
    "acceptance length": "Output tokens per verify step, the bonus token included. Without drafts it is 1.",
    "without looping": "The same over the prompts whose text does not run into repeating itself.",
    "looping": "Prompts whose text repeats itself to its end: drafts of such texts are accepted too easily.",
    "accepted at depth": "Of the drafts that reached a depth, all before it accepted: the share in which the "
    "target chose a drafted token there too.",
    "steps that accepted": "How many verify steps accepted 0, 1, 2 … drafted tokens.",
    "drafted, accepted a step": "Tokens that a verify step put before the target beside the last certain "
    "one, and those of them that it chose.",
    "ms a step": "Wall time of a step by part; whole: of steps that the device ran from end to end.",
    "tokens/s": "Output tokens of all rows per second.",
    "speed-up": "Tokens/s over those of the same engine with drafts off, measured in turn in one run.",
    "chosen": "The loop itself chose the shape of each draft from what it measured.",
    "differing texts": "Texts that differ from those without drafts. With one seed the law is the same; in "
    "low precision the rounding of windows of different widths may still part two equally good tokens.",
    "category all": "The steps of every category together.",
    "p10, p90": "The ends of the middle four fifths: over prompts for acceptance, over single "
    "measurements for speed.",
}

Format = Callable[[float], str]


def _decimals(count: int) -> Format:
    return lambda value: f"{value:,.{count}f}"


@dataclass(frozen=True, slots=True)
class Column:
    """What a column shows of a record: the places of its figures, the first of which it is sorted by."""

    name: str
    paths: tuple[str, ...]
    shown: Format


COLUMNS = (
    Column("acceptance length", ("acceptance_length", "spread.0", "spread.1"), _decimals(2)),
    Column("without looping", ("acceptance_length_not_looping",), _decimals(2)),
    Column("speed-up", ("speedup.median", "speedup.p10", "speedup.p90"), times),
    Column("tokens/s", tuple(f"tokens_per_second.{part}" for part in ("median", "p10", "p90")), _decimals(1)),
    Column("accepted at depth 1, 2 …, %", ("per_depth.*",), lambda value: f"{100 * value:.0f}"),
    Column("drafted a step", ("drafted_per_step",), _decimals(2)),
    Column("accepted a step", ("accepted_per_step",), _decimals(2)),
    *(Column(f"ms a step: {part}", (f"ms_per_step.{part}",), _decimals(2)) for part in PHASES),
    Column("steps that accepted 0, 1 …", ("histogram.*",), _decimals(0)),
    Column("prompts", ("prompts",), _decimals(0)),
    Column("looping", ("looping",), _decimals(0)),
    Column("tokens", ("tokens",), _decimals(0)),
    Column("steps", ("steps",), _decimals(0)),
    Column("differing texts", ("differing_texts",), _decimals(0)),
    Column("seconds", ("seconds",), _decimals(1)),
)


def write_page(result: dict[str, Any], folder: Path) -> None:
    """Write `index.html` and, as files of their own, the pictures over all categories."""
    folder.mkdir(parents=True, exist_ok=True)
    records = _in(result, "all") or result["records"]
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(records), "utf-8")
    (folder / "index.html").write_text(page(result), "utf-8")


def page(result: dict[str, Any]) -> str:
    """Lay out the page of a result."""
    template = Template(files(__package__).joinpath("page.html").read_text("utf-8"))
    named = dict.fromkeys(record.get("category") or "all" for record in result["records"])
    categories = sorted(named, key=lambda name: name != "all")
    panels = (f"#show{i}:checked ~ #panel{i} {{ display: block; }}" for i in range(len(categories)))
    examples = result.get("examples") or []
    deepest = max((int(origin) for one in examples for _, origin in one.get("pieces") or []), default=0)
    shades = max(min(deepest, SHADES), 1)
    depths = (f".d{depth} {{ --share: {depth / shades:g}; }}" for depth in range(1, shades + 1))
    return template.substitute(
        title=escape(f"Acceptance: {Path(str(result.get('model') or 'a model')).name}"),
        subtitle=_subtitle(result),
        charts=STYLE,
        panels="\n".join(panels),
        depths="\n".join(depths),
        pictures="\n".join(_pictures(result, categories)),
        columns="".join(_head()),
        rows="\n".join(_row(i, record) for i, record in enumerate(result["records"])),
        examples="\n".join(_examples(examples, deepest)),
        definitions=_list(DEFINITIONS.items()),
        circumstances=_list(_circumstances(result)),
        result=_embedded(result),
    )


def _in(result: dict[str, Any], category: str) -> list[Record]:
    return [r for r in result["records"] if (r.get("category") or "all") == category]


def _subtitle(result: dict[str, Any]) -> str:
    told = [f"specdec bench acceptance, commit {result['commit']}"] if result.get("commit") else []
    told += [str(result[name]) for name in ("gpu", "cpu") if result.get(name)]
    return escape(" · ".join(told))


def _pictures(result: dict[str, Any], categories: Sequence[str]) -> Iterator[str]:
    """Yield a choice for each category, then the panels it chooses from: styles alone connect them."""
    for i, category in enumerate(categories):
        checked = " checked" if i == 0 else ""
        yield f'<input type="radio" name="category" id="show{i}"{checked}>'
        yield f'<label for="show{i}">{escape(category)}</label>'
    for i, category in enumerate(categories):
        yield f'<div class="panel" id="panel{i}" data-category="{escape(category)}">'
        for draw in PICTURES.values():
            records = _in(result, category)
            wide, narrow = draw(records, alone=False), draw(records, alone=False, width=NARROW)
            yield f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'
        yield "</div>"


def _head() -> Iterator[str]:
    for name in ("setting", "temperature", "batch", "category"):
        yield f'<th scope="col" class="text">{name}</th>'
    for column in COLUMNS:
        yield f'<th scope="col">{escape(column.name)}</th>'


def _row(index: int, record: Record) -> str:
    name = str(record.get("name") or "unnamed")
    setting = (record.get("setting") or {}).items()
    about = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in setting)
    cells = [f'<th scope="row" data-sort="{escape(name)}" title="{escape(about)}">{escape(name)}</th>']
    for value in (field(record, "temperature"), field(record, "batch"), record.get("category")):
        text = plain(value)
        cells.append(f'<td class="text" data-sort="{escape(text)}">{escape(text)}</td>')
    cells += [_cell(record, column) for column in COLUMNS]
    return f'<tr data-record="{index}">{"".join(cells)}</tr>'


def _cell(record: Record, column: Column) -> str:
    """Show the figures of a column: a list side by side, or a figure and its range."""
    first, *rest = (
        [_figure(place, v, column.shown) for place, v in _values(record, p)] for p in column.paths
    )
    if not first:
        return '<td data-sort="">–</td>'
    ends = "–".join(figure for found in rest for figure in found)
    span = f' <span class="range">{ends}</span>' if ends else ""
    _, by = next(_values(record, column.paths[0]))
    return f'<td data-sort="{by}">{" · ".join(first)}{span}</td>'


def _figure(place: str, value: float, shown: Format) -> str:
    return f'<data data-field="{place}" value="{value}">{shown(value)}</data>'


def _values(record: Record, path: str) -> Iterator[tuple[str, float]]:
    """Yield the place and the value of each figure that a path leads to; `*` stands for all of a list."""
    value: Any = record
    *parents, last = path.split(".")
    for key in parents:
        value = value.get(key) if isinstance(value, dict) else None
    match value, last:
        case dict(), _:
            found = [(path, value.get(last))]
        case list(), "*":
            found = [(f"{'.'.join(parents)}.{i}", one) for i, one in enumerate(value)]
        case list(), _:
            found = [(path, one) for one in value[int(last) :][:1]]
        case _:
            found = []
    for place, one in found:
        if isinstance(one, int | float) and math.isfinite(one):
            yield place, one


def _examples(examples: Sequence[dict[str, Any]], deepest: int) -> Iterator[str]:
    if not examples:
        yield "<p>The result holds no example.</p>"
        return
    yield (
        "<p>The end of a prompt in grey, then what was written. Point at a token to see where it came from, "
        "or go to the text with the tab key and from token to token with the arrow keys.</p>"
    )
    shades = range(1, min(deepest, SHADES) + 1)
    drafted = [f"drafted at depth {depth}" + " or deeper" * (depth == SHADES < deepest) for depth in shades]
    entries = (f"<li>{_token(name, depth)}</li>" for depth, name in enumerate([OWN, *drafted]))
    yield f'<ul class="legend" aria-label="Legend">{"".join(entries)}</ul>'
    first = next((i for i, one in enumerate(examples) if any(n for _, n in one.get("pieces") or [])), 0)
    for i, one in enumerate(examples):
        name = ", ".join(str(one[key]) for key in ("setting", "category") if one.get(key))
        pieces = [_token(*piece, tabindex=-min(j, 1)) for j, piece in enumerate(one.get("pieces") or [])]
        prompt = escape(str(one.get("prompt") or ""))
        words = f'<pre class="example"><span class="prompt">{prompt}</span>{"".join(pieces)}</pre>'
        opened = " open" if i == first else ""
        yield f"<details{opened}><summary>{escape(name) or 'an example'}</summary>{words}</details>"


def _token(text: str, origin: int, **attributes: int) -> str:
    """Colour a text by its origin."""
    more = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f'<span class="from d{min(origin, SHADES)}" data-origin="{origin}"{more}>{escape(text)}</span>'


def _list(entries: Iterable[tuple[str, Any]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in entries)


def _circumstances(result: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all that is said beside the records, nested names joined."""
    for name, value in result.items():
        if name not in ("records", "examples"):
            yield from _flat(name, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}: {key}" if ":" not in name else f"{name}.{key}", inner)
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        yield name.replace("_", " "), "–" if text is None or text == "" else text


def _embedded(result: dict[str, Any]) -> str:
    """Write the result so that no text in it can end the element that holds it."""
    text = json.dumps(_finite(result), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Put null where JSON has no figure."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
