"""A self-contained page of a result: plots, the table of all records, and texts coloured by token origin."""

from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from specdec.bench.acceptance.names import Record, field, plain
from specdec.bench.acceptance.plots import PLOTS
from specdec.bench.acceptance.summary import ALL
from specdec.bench.plots import inline_svg, save_plot
from specdec.core.stats import PHASES

SHADES = 8
"""Depths with their own shade; deeper ones share the last."""
DEFINITIONS = {
    "acceptance length": "Output tokens per verify step, the bonus token included. Without drafts it is 1.",
    "looping": "Prompts whose output repeats itself to its end: their drafts are accepted too easily.",
    "accepted at depth": "Of the drafts that reached a depth with all tokens before it accepted, the share "
    "accepted there.",
    "steps that accepted 0, 1 …": "Verify steps by their number of accepted draft tokens.",
    "ms a step": "Mean wall time of a step by phase; whole: steps that run as one graph or tape.",
    "tokens/s": "Output tokens of all rows per second, prefill included.",
    "speedup": "Tokens/s over those of the same engine without drafts, measured in turn in one run.",
    "differing texts": "Texts that differ from those without drafts. With one seed the distribution is the "
    "same; in low precision the window width can change rounding, and so an output.",
    "p10, p90": "Over prompts for acceptance, over batches of prompts for speed.",
}


def _number(value: float | None, decimals: int = 0) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"


def _median(figure: Mapping[str, float], decimals: int) -> str:
    median, low, high = (_number(figure[part], decimals) for part in ("median", "p10", "p90"))
    return f"{median} ({low} to {high})"


def _length(record: Record) -> str:
    ends = " to ".join(_number(end, 2) for end in record["spread"] or ())
    return _number(record["acceptance_length"], 2) + f" ({ends})" * bool(ends)


COLUMNS: dict[str, Callable[[Record], str]] = {
    "setting": lambda r: str(r["name"]),
    "temperature": lambda r: plain(field(r, "temperature")),
    "batch": lambda r: plain(field(r, "batch")),
    "category": lambda r: str(r["category"]),
    "acceptance length": _length,
    "without looping": lambda r: _number(r["acceptance_length_not_looping"], 2),
    "speedup": lambda r: _median(r["speedup"], 2),
    "tokens/s": lambda r: _median(r["tokens_per_second"], 1),
    "accepted at depth 1, 2 …": lambda r: " ".join(f"{share:.0%}" for share in r["per_depth"]),
    "drafted a step": lambda r: _number(r["drafted_per_step"], 2),
    "accepted a step": lambda r: _number(r["accepted_per_step"], 2),
    "steps that accepted 0, 1 …": lambda r: " ".join(map(_number, r["histogram"])),
    f"ms a step: {', '.join(PHASES)}": lambda r: ", ".join(_number(r["ms_per_step"][p], 2) for p in PHASES),
    "prompts": lambda r: _number(r["prompts"]),
    "looping": lambda r: _number(r["looping"]),
    "tokens": lambda r: _number(r["tokens"]),
    "steps": lambda r: _number(r["steps"]),
    "differing texts": lambda r: _number(r["differing_texts"]),
    "seconds": lambda r: _number(r["seconds"], 1),
}


def write_page(result: dict[str, Any], folder: Path) -> None:
    """Write `index.html`, and the plots over all categories as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [r for r in result["records"] if r["category"] == ALL]
    for name, plot in PLOTS.items():
        save_plot(plot(records), folder, name)
    (folder / "index.html").write_text(page(result), "utf-8")


def page(result: dict[str, Any]) -> str:
    """Render the page. It loads no resources and runs no script."""
    template = files(__package__).joinpath("page.html").read_text("utf-8")
    examples, records = result["examples"], result["records"]
    deepest = max((origin for one in examples for _, origin in one["pieces"]), default=0)
    about = [f"specdec bench acceptance, commit {result['commit']}", *map(result.get, ("cpu", "gpu"))]
    return (
        Environment(autoescape=True, undefined=StrictUndefined)
        .from_string(template)
        .render(
            title=f"Acceptance: {Path(result['model']).name}",
            subtitle=" · ".join(str(part) for part in about if part),
            categories=list(_plots(records)),
            columns=COLUMNS,
            records=records,
            examples=examples,
            deepest=deepest,
            shades=min(deepest, SHADES),
            definitions=DEFINITIONS,
            environment=_flat(result),
        )
    )


def _plots(records: list[Record]) -> Iterator[tuple[str, list[str]]]:
    """Yield each category with its plots as SVG, all prompts first."""
    categories = dict.fromkeys(record["category"] for record in records)
    for category in sorted(categories, key=lambda name: name != ALL):
        own = [r for r in records if r["category"] == category]
        yield category, [inline_svg(plot(own), f"{name}: {category}") for name, plot in PLOTS.items()]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield all fields except records and examples, joining nested names."""
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{name}: ")
        elif name not in ("records", "examples"):
            text = ", ".join(map(str, inner)) if isinstance(inner, list | tuple) else inner
            yield f"{prefix}{name}".replace("_", " "), "–" if text in (None, "") else str(text)
