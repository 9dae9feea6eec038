"""Types of a parameter by its JSON schema, and conversion of plain values to JSON."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
"""JSON's name of a value's type; all others are null."""
NULLS, BOOLEANS = ("null", "None"), {"true": "true", "false": "false"}


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return the types that a parameter may have; the default is a string.

    Alternatives and references are followed, each once: a client's schema may be recursive.
    """
    properties = schema.get("properties")
    left = [properties.get(key)] if isinstance(properties, Mapping) else []
    found, passed = set[str](), set[str]()
    while left:
        own = left.pop()
        if not isinstance(own, Mapping):
            continue
        found.update(_named(own))
        left += [alternative for word in ("anyOf", "oneOf", "allOf") for alternative in _listed(own, word)]
        where = own.get("$ref")
        if isinstance(where, str) and where not in passed:
            passed.add(where)
            left.append(_referred(schema, where))
    return found or {"string"}


def as_json(text: str, types: set[str]) -> str:
    """Convert a value to JSON of one of the types, or to a JSON string if it fits none."""
    plain = text.strip()
    if "null" in types and plain in NULLS:
        return "null"
    if "boolean" in types and plain.lower() in BOOLEANS:
        return BOOLEANS[plain.lower()]
    if "string" not in types:
        try:
            return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _named(own: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names, or the types of the values that it lists."""
    if named := own.get("type"):
        yield from (name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str))
        return
    values = [*_listed(own, "enum"), *([own["const"]] if "const" in own else [])]
    yield from (TYPES.get(type(value), "null") for value in values)
    yield from (kind for kind, word in (("object", "properties"), ("array", "items")) if word in own)


def _referred(root: Any, where: str) -> Any:
    """Resolve a reference within a schema, or return None."""
    start, *path = where.split("/")
    for word in path if start == "#" else ("",):
        root = root.get(word) if isinstance(root, Mapping) else None
    return root


def _listed(own: Mapping[str, Any], word: str) -> list[Any]:
    found = own.get(word)
    return found if isinstance(found, list) else []
