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
    stack = [properties.get(key)] if isinstance(properties, Mapping) else []
    types, passed = set[str](), set[str]()
    while stack:
        node = stack.pop()
        if not isinstance(node, Mapping):
            continue
        types.update(_named(node))
        stack += [alternative for word in ("anyOf", "oneOf", "allOf") for alternative in _listed(node, word)]
        ref = node.get("$ref")
        if isinstance(ref, str) and ref not in passed:
            passed.add(ref)
            stack.append(_referred(schema, ref))
    return types or {"string"}


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


def _named(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names, or the types of the values that it lists."""
    if kinds := schema.get("type"):
        yield from (name for name in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(name, str))
        return
    values = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    yield from (TYPES.get(type(value), "null") for value in values)
    yield from (kind for kind, word in (("object", "properties"), ("array", "items")) if word in schema)


def _referred(root: Any, ref: str) -> Any:
    """Resolve a reference within a schema, or return None."""
    start, *path = ref.split("/")
    for word in path if start == "#" else ("",):
        root = root.get(word) if isinstance(root, Mapping) else None
    return root


def _listed(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []
