"""Documentation tables generated from the code: `python -m tests.doc_tables` writes them."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from specdec.config.aliases import ALIASES
from specdec.config.base import Settings
from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.config.structured import Structure
from specdec.config.thinking import ThinkingSpan
from specdec.models import families
from specdec.ray.settings import RayConfig
from specdec.server.settings import ServerConfig
from specdec.setup.capabilities import AXES, cells, refusal

TABLES: tuple[type[Settings], ...] = (
    EngineConfig,
    SamplingParams,
    Structure,
    ThinkingSpan,
    ServerConfig,
    RayConfig,
)
TERSE = (
    (r"an? (?:integer|number) of at least (\S+)\b", r"≥ \1"),
    (r"an? (?:integer|number) above (\S+)\b", r"> \1"),
    (r"an? (?:integer|number) (?:from |(?=[-\d]))", ""),
    (r"a number of bytes such as \d+ or", "bytes or"),
    (r"True or False(, or None)?", "bool"),
)
"""Shorter wordings of a setting's values, for tables."""
DOCS = Path(__file__).parents[1] / "docs"
TITLES: Mapping[str, str] = {
    "host": "no graphs",
    "device": "graphs",
    "read": "no prefix cache",
    "kept": "prefix cache",
    **families.TITLES,
    "temperature": "temperature with a seed",
    "filters": "top-k, top-p and min-p",
    "logit_bias": "bias",
    "logprobs": "log-probabilities",
    "stop": "stop strings",
    "structured": "structured output and least lengths",
    "words": "allowed tokens and bad words",
    "alone": "one row",
    "mixed": "prompts beside decoding rows",
}
"""Display names of values."""
LISTED: Mapping[str, str] = {"family": "families", "sampling": "sampling rules", "batch": "batches"}
"""The axes shown as lists in the table, and their titles."""


def tables() -> Iterator[tuple[Path, str, str]]:
    """Yield each table's page, marker name and text."""
    yield DOCS / "families.md", "capabilities", capability_table()
    yield DOCS / "settings.md", "aliases", alias_table()
    for settings in TABLES:
        yield DOCS / "settings.md", settings.__name__, settings_table(settings)


def shown(page: str, marker: str) -> str:
    """Return the part of a page between two markers."""
    return page.split(f"<!-- {marker} -->\n")[1].split(f"\n<!-- /{marker} -->")[0]


def alias_table() -> str:
    """Render the aliases as settings.md shows them."""
    rows = [["option", "of", "the same as", ""], ["---"] * 4]
    for name, own in ALIASES.items():
        fields = ", ".join(f"`{field}`" for field in own.fields)
        rows.append([f"`--{name.replace('_', '-')}`", own.engine, fields, own.note])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def settings_table(settings: type[Settings]) -> str:
    """Render the fields as docs/settings.md shows them."""
    rows = [["field", "what it does", "values", "default"], ["---"] * 4]
    for name, field in settings.model_fields.items():
        values = field.description or ""
        for pattern, terse in TERSE:
            values = re.sub(pattern, terse, values)
        rows.append([f"`{name}`", field.title or "", values, f"`{field.default!r}`"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("<", "&lt;")


def capability_table() -> str:
    """Render the capabilities for docs/families.md; drafters with equal capabilities share a column."""
    marked = [(axis, value) for axis in ("shape", "backing", "steps", "prefixes") for value in AXES[axis]]
    sharing: dict[tuple[str, ...], list[str]] = {}
    for drafter in AXES["drafter"]:
        found = [cell for cell in cells() if cell.drafter == drafter and not refusal(cell)]
        marks = ["yes" if any(getattr(c, axis) == v for c in found) else "–" for axis, v in marked]
        lists = [_listed(axis, {getattr(cell, axis) for cell in found}) for axis in LISTED]
        sharing.setdefault((*marks, *lists), []).append(f"`{drafter}`")
    names = [*(TITLES.get(value, value) for _, value in marked), *LISTED.values()]
    rows = [["", *(", ".join(drafters) for drafters in sharing.values())], ["---"] * (1 + len(sharing))]
    rows += [list(row) for row in zip(names, *sharing, strict=True)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _listed(axis: str, held: Collection[str]) -> str:
    """Return the shorter list: an axis's supported values, or the others."""
    own, missing = (
        [TITLES.get(value, value) for value in AXES[axis] if (value in held) == wanted]
        for wanted in (True, False)
    )
    if not own:
        return "–"
    if len(own) < len(missing):
        return ", ".join(own)
    return f"all but {', '.join(missing)}" if missing else "all"


if __name__ == "__main__":
    for path, marker, table in tables():
        page = path.read_text("utf-8")
        path.write_text(page.replace(shown(page, marker), table), "utf-8")
