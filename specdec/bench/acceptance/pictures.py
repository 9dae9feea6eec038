"""The benchmark's pictures: acceptance by depth, speed-up by shape, and how many drafts a step accepted."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specdec.bench.charts import (
    NUM_COLOURS,
    Bars,
    Histogram,
    Line,
    bar_chart,
    histogram_chart,
    line_chart,
    times,
)

Record = dict[str, Any]
Draw = Callable[..., str]

SHARED = ("temperature", "batch")
"""Fields of a setting that say how it was asked, not what drafts."""


def setting_key(record: Record) -> str:
    """Return what tells a record's setting from all others: fields that hold nothing may be newer than it."""
    setting = {name: value for name, value in (record.get("setting") or {}).items() if value is not None}
    return json.dumps(setting or record.get("name"), sort_keys=True)


def field(record: Record, name: str) -> Any:
    return (record.get("setting") or {}).get(name)


def plain(value: Any) -> str:
    """Write what a setting holds as people would: 0, not 0.0."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def drafters(records: Iterable[Record]) -> dict[str, str]:
    """Name what drafts in each setting, whatever the temperature and the batch, by the setting's key.

    Where settings of one name differ in more than those, what differs joins the name.
    """
    settings = {setting_key(r): (r.get("name") or "unnamed", r.get("setting") or {}) for r in records}
    shapes: dict[str, list[dict[str, Any]]] = {}
    for name, setting in settings.values():
        shapes.setdefault(name, []).append({k: v for k, v in setting.items() if k not in SHARED})
    named = {}
    for key, (name, setting) in settings.items():
        own = shapes[name]
        varying = [k for k in setting if k not in SHARED and any(s.get(k) != setting[k] for s in own)]
        named[key] = ", ".join([name, *(f"{k.replace('_', ' ')} {setting[k]}" for k in varying)])
    return named


def condition(record: Record, records: Sequence[Record]) -> str:
    """Say how a record was asked, as far as the records differ in it."""
    varying = [name for name in SHARED if len({field(r, name) for r in records}) > 1]
    return ", ".join(f"{name} {plain(field(record, name))}" for name in varying)


def acceptance_by_depth(records: Sequence[Record], **look: Any) -> str:
    """Draw a line for each drafter: its colour names the drafter, its dashes the temperature."""
    chosen, names = _narrowest([r for r in records if r.get("per_depth")]), drafters(records)
    shapes = list(dict.fromkeys(names[setting_key(r)] for r in chosen))
    temperatures = list(dict.fromkeys(field(r, "temperature") for r in chosen))
    lines = []
    for r in chosen:
        # A seventh drafter has the colour of the first, and dashes that no temperature of the first has.
        again, colour = divmod(shapes.index(names[setting_key(r)]), NUM_COLOURS)
        dash = temperatures.index(field(r, "temperature")) + len(temperatures) * again
        depths = range(1, len(r["per_depth"]) + 1)
        lines.append(Line(_named(r, chosen, names), depths, r["per_depth"], colour=colour, dash=dash))
    return line_chart(
        lines,
        "Acceptance by depth",
        "depth of the draft",
        "accepted, of the drafts that reached the depth",
        y_percent=True,
        y_range=(0, 1),
        **look,
    )


def speedup_by_shape(records: Sequence[Record], **look: Any) -> str:
    """Draw a group of bars for each drafter, one for each temperature and batch."""
    drafting = [r for r in records if field(r, "draft") != "none"]
    names = drafters(records)
    groups = list(dict.fromkeys(names[setting_key(r)] for r in drafting))
    found: dict[str, dict[str, Record]] = {}
    for r in drafting:
        found.setdefault(condition(r, drafting), {})[names[setting_key(r)]] = r.get("speedup") or {}
    series = [
        Bars(name, *([own.get(g, {}).get(part) for g in groups] for part in ("median", "p10", "p90")))
        for name, own in found.items()
    ]
    return bar_chart(
        groups,
        series,
        "Speed-up by shape",
        "speed-up over the same engine without drafts; whiskers: p10 to p90",
        reference=1.0,
        shown=times,
        **look,
    )


def histogram(records: Sequence[Record], **look: Any) -> str:
    """Draw a small frame for each drafter."""
    chosen, names = _narrowest([r for r in records if len(r.get("histogram") or []) > 1]), drafters(records)
    frames = [Histogram(_named(r, chosen, names), r["histogram"]) for r in chosen]
    return histogram_chart(frames, "Drafted tokens that a step accepts", "accepted in a step", **look)


PICTURES: dict[str, Draw] = {
    "acceptance-by-depth": acceptance_by_depth,
    "speedup-by-shape": speedup_by_shape,
    "histogram": histogram,
}


def _narrowest(records: Sequence[Record]) -> list[Record]:
    """Keep, of the batches of one drafter and temperature, the smallest: acceptance hardly depends on it."""
    names = drafters(records)
    kept: dict[tuple[str, Any], Record] = {}
    for r in sorted(records, key=lambda r: field(r, "batch") or 0):
        kept.setdefault((names[setting_key(r)], field(r, "temperature")), r)
    return [r for r in records if any(r is one for one in kept.values())]


def _named(record: Record, records: Sequence[Record], names: dict[str, str]) -> str:
    temperature = field(record, "temperature")
    several = len({field(r, "temperature") for r in records}) > 1
    return names[setting_key(record)] + f", temperature {plain(temperature)}" * several
