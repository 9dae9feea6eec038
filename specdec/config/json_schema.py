"""Find parts of a JSON schema that would not constrain the output: xgrammar ignores some silently.

A schema is handled by the first of `HEADS` that it has, or else by its types; most keywords of each type are
supported. Tested with xgrammar 0.2.8, which reports this on standard error only.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
"""JSON's name of a value's type; all others are null."""

HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Only the first of these that a schema has is used."""
NEVER = {
    *("not", "if", "$dynamicRef", "$recursiveRef", "multipleOf", "uniqueItems", "contains"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
}
"""Unsupported: multipleOf works in some cases, but not in every version nor with all bounds."""
OBJECTS = ("properties", "additionalProperties", "unevaluatedProperties")
ARRAYS = ("items", "prefixItems", "unevaluatedItems")
"""A schema without a type is handled as an object or array schema if it has one of these."""
WORDS = {
    *(*HEADS, *NEVER, *OBJECTS, *ARRAYS, "type", "patternProperties", "propertyNames", "required"),
    *("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
"""All constraining keywords; others only describe."""
IDLE = {
    *("uniqueItems", "required", "minLength", "minItems", "minProperties", "properties"),
    *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
}
"""Keywords without effect if 0, false or empty."""
BESIDE = (
    *(("minLength", "pattern"), ("maxLength", "pattern")),
    *(("minLength", "format"), ("maxLength", "format"), ("pattern", "format")),
    *(("propertyNames", "properties"), ("propertyNames", "patternProperties")),
    ("patternProperties", "properties"),
)
"""Pairs of which the first is ignored."""
FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    *("uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}
UNREAD_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}
"""Other formats of JSON Schema; all further ones have no effect by its rules."""
ESCAPED, LOOK_AHEAD = re.compile(r"\\."), re.compile(r"\(\?[=!]")
LONGEST = 80
"""Maximum characters of a location in a message."""
MAPS = ("properties", "patternProperties")
PARTS = ("anyOf", "oneOf", "allOf", *ARRAYS, *OBJECTS[1:], "propertyNames")
"""Keywords that contain schemas, one or several."""

Place = tuple[str, Any]
"""A schema's location, and the schema."""


def unread(schema: Any) -> str | None:
    """Return the first part of a schema that would not constrain the output, with the remedy, or None."""
    left: list[Place] = [("#", schema)]
    passed: dict[int, Any] = {}
    while left:
        where, own = left.pop()
        if not isinstance(own, Mapping) or id(own) in passed:
            continue  # nested references would otherwise visit the lowest level exponentially often
        passed[id(own)] = own
        if found := _unread(own, schema):
            return f"unsupported: {found} (at {where}); write the schema without it"
        reference = own.get("$ref")
        if isinstance(reference, str):
            left.append((reference[:LONGEST], referred(schema, reference)))
        left += _parts(own, where)
    return None


def unread_form(kind: str, form: Any) -> str | None:
    """Return such a part of a structured output's schemas; None also for invalid JSON."""
    if kind not in ("json_schema", "structural_tag"):
        return None
    try:
        given = json.loads(form) if isinstance(form, str) else form
    except (ValueError, RecursionError):
        return None
    schemas = [given] if kind == "json_schema" else _schemas_of(given)
    return next((found for schema in schemas if (found := unread(schema))), None)


def referred(root: Any, where: str) -> Any:
    """Resolve a reference within a schema, or return None."""
    start, *path = where.split("/")
    for word in path if start == "#" else ("",):
        root = root.get(word) if isinstance(root, Mapping) else None
    return root


def _unread(own: Mapping[str, Any], root: Any) -> str | None:
    """Return the ignored part of a schema itself, without its subschemas, or None."""
    words = [word for word in own if word in WORDS and not _is_idle(word, own[word])]
    if never := [word for word in words if word in NEVER]:
        return never[0]
    if head := next((word for word in HEADS if word in own), None):
        types = _types_of(own)
        beside = (w for w in words if w != head and not (w == "type" and _all_are(types, own, head, root)))
        if word := next(beside, None):
            return f"{word} beside {head}"
        return _unread_head(head, own[head])
    if words and not any(word in own for word in ("type", *OBJECTS, *ARRAYS)):
        return f"{words[0]} without type"
    return _unread_of_type(own, words)


def _is_idle(word: str, value: Any) -> bool:
    """Return whether a keyword has no effect at this value."""
    if word == "format":
        return not isinstance(value, str) or value not in FORMATS | UNREAD_FORMATS
    return (not value and word in IDLE) or (value is True and word not in NEVER)


def _unread_head(head: str, value: Any) -> str | None:
    if head == "$ref" and isinstance(value, str) and value != "#" and not value.startswith("#/"):
        return "$ref to anything but a place in the same schema"
    if head == "allOf" and isinstance(value, list) and len(value) > 1:
        return "allOf with several schemas"
    return None


def _unread_of_type(own: Mapping[str, Any], words: Collection[str]) -> str | None:
    if "format" in words and own["format"] in UNREAD_FORMATS:
        return f"format {own['format']}"
    if pair := next((pair for pair in BESIDE if {*pair} <= {*words}), None):
        return " beside ".join(pair)
    pattern, patterns = own.get("pattern"), own.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) > 1:
        return "patternProperties with several patterns"
    if isinstance(pattern, str) and LOOK_AHEAD.search(ESCAPED.sub("", pattern)):
        return "a look-ahead in pattern"
    known, required = own.get("properties"), own.get("required")
    names = known if isinstance(known, Mapping) else {}
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in names:
            return f"required {name!r:.40}, which is none of properties,"
    return None


def _types_of(own: Mapping[str, Any]) -> set[str]:
    """Return the types by which a schema is handled; a number may be an integer."""
    named = own.get("type")
    types = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if "type" not in own:
        types = {kind for kind, words in (("object", OBJECTS), ("array", ARRAYS)) if own.keys() & words}
    return types | ({"integer"} if "number" in types else set())


def _all_are(types: set[str], own: Mapping[str, Any], head: str, root: Any) -> bool:
    """Return whether all values that the head admits are of these types anyway."""
    options = own[head] if head in ("anyOf", "oneOf", "allOf") and isinstance(own[head], list) else [own]
    meant = {id(one): one for one in (_meant(option, root) for option in options)}
    return all(_is_of(types, one) for one in meant.values())


def _meant(own: Any, root: Any) -> Any:
    reference = own.get("$ref") if isinstance(own, Mapping) else None
    return referred(root, reference) if isinstance(reference, str) else own


def _is_of(types: set[str], meant: Any) -> bool:
    if not isinstance(meant, Mapping):
        return False
    values = [meant["const"]] if "const" in meant else meant.get("enum")
    found = {TYPES.get(type(one), "null") for one in values} if isinstance(values, list) else _types_of(meant)
    return bool(found) and found <= types


def _parts(own: Mapping[str, Any], where: str) -> Iterator[Place]:
    """Yield a schema's subschemas. Properties may be named like keywords."""
    for word in (*MAPS, *PARTS):
        value, place = own.get(word), f"{where}/{word}"
        if isinstance(value, Mapping) and word not in MAPS:
            # A property name is a text even if its schema does not say so.
            yield place[:LONGEST], {"type": "string", **value} if word == "propertyNames" else value
        elif isinstance(value, Mapping | list):
            named = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from ((f"{place}/{name}"[:LONGEST], part) for name, part in named)


def _schemas_of(tag: Any) -> Iterator[Any]:
    left = [tag]
    while left:
        own = left.pop()
        if isinstance(own, Mapping):
            if "json_schema" in own:
                yield own["json_schema"]
            left += [part for word, part in own.items() if word != "json_schema"]
        elif isinstance(own, list):
            left += own
