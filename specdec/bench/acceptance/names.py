"""Names of settings: the key that identifies one, and labels that distinguish those of one result."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]

SHARED = ("temperature", "batch")
"""Fields of a setting that describe the conditions rather than the drafter."""


def setting_key(record: Record) -> str:
    """Return a key of a record's setting, ignoring None fields, which may be newer than the record."""
    setting = {name: value for name, value in (record.get("setting") or {}).items() if value is not None}
    return json.dumps(setting or record.get("name"), sort_keys=True)


def field(record: Record, name: str) -> Any:
    return (record.get("setting") or {}).get(name)


def plain(value: Any) -> str:
    """Format a setting's value for people: 0, not 0.0."""
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def drafters(records: Iterable[Record]) -> dict[str, str]:
    """Name the drafter of each setting, by the setting's key, ignoring temperature and batch.

    Settings of one name that differ in other fields get those fields in their names.
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
    """Describe the conditions of a record in which the records differ."""
    varying = [name for name in SHARED if len({field(r, name) for r in records}) > 1]
    return ", ".join(f"{name} {plain(field(record, name))}" for name in varying)
