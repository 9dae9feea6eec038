"""JSON schema keywords that xgrammar ignores are refused by name, the others accepted."""

import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as some

from specdec import ConfigError, Structure
from specdec.config import json_schema
from specdec.config.json_schema import BESIDE, FORMATS, HEADS, NEVER, UNREAD_FORMATS, unread
from specdec.text.grammar.child import BLANKS

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TWO = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
NAMES = {"type": "object", "additionalProperties": INTEGER}
KINDS = {"$defs": {"text": TEXT}}

READ_OVER: list[tuple[str, dict[str, Any], Any]] = [
    ("not", {**TEXT, "not": {"const": "x"}}, "x"),
    ("if", {**TWO, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, 0.3),
    ("multipleOf", {**INTEGER, "multipleOf": 7, "minimum": 0}, 8),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}, [1, 1]),
    ("contains", {"type": "array", "items": INTEGER, "contains": {"const": 5}}, [1]),
    ("contains", {"type": "array", "items": INTEGER, "contains": {"const": 5}, "maxContains": 1}, [5, 5]),
    ("dependentRequired", {**TWO, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ("dependentSchemas", {**TWO, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ("dependencies", {**TWO, "dependencies": {"a": ["b"]}}, {"a": 1}),
    ("$dynamicRef", {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", **TEXT}}}, 1),
    ("$recursiveRef", {"type": "object", "properties": {"a": {"$recursiveRef": "#"}}}, {"a": 3}),
    ("$ref", {"$ref": "https://example.com/schema"}, 1),
    ("$ref", {"$defs": {"text": {"$anchor": "here", **TEXT}}, "$ref": "#here"}, 1),
    ("minLength beside $ref", {**KINDS, "$ref": "#/$defs/text", "minLength": 3}, "x"),
    ("type beside $ref", {**KINDS, "$ref": "#/$defs/text", "type": "integer"}, "x"),
    ("minLength beside enum", {"enum": ["a", "bbb"], "minLength": 2}, "a"),
    ("type beside enum", {**TEXT, "enum": ["a", 1]}, 1),
    ("type beside const", {**TEXT, "const": 1}, 1),
    ("anyOf beside enum", {"enum": ["a", "b"], "anyOf": [{"const": "a"}]}, "b"),
    ("properties beside anyOf", {**TWO, "anyOf": [{"properties": {"c": TEXT}}]}, {"c": "x"}),
    ("type beside anyOf", {**TEXT, "anyOf": [{"const": 1}, {"const": "a"}]}, 1),
    ("allOf with several schemas", {"allOf": [{**TEXT, "minLength": 2}, {**TEXT, "maxLength": 3}]}, 1),
    ("minimum without type", {"minimum": 3}, 2),
    ("minLength without type", {"minLength": 3}, "a"),
    ("required without type", {"required": ["a"]}, {}),
    ("minItems without type", {"minItems": 1}, []),
    ("patternProperties without type", {"patternProperties": {"^a": INTEGER}}, {"a": "x"}),
    ("minLength beside pattern", {**TEXT, "pattern": "^a+$", "minLength": 3}, "aa"),
    ("maxLength beside pattern", {**TEXT, "pattern": "^a+$", "maxLength": 3}, "aaaa"),
    ("maxLength beside format", {**TEXT, "format": "date", "maxLength": 3}, "2020-01-01"),
    ("pattern beside format", {**TEXT, "format": "date", "pattern": "^2"}, "1020-01-01"),
    ("a look-ahead", {**TEXT, "pattern": "^(?!a)[a-z]*$"}, "ab"),
    ("required 'z'", {**TWO, "required": ["a", "z"]}, {"a": 1}),
    ("required 'z'", {**NAMES, "required": ["z"]}, {}),
    ("propertyNames", {**NAMES, "properties": {"y": INTEGER}, "propertyNames": {"pattern": "^x"}}, {"y": 1}),
    ("propertyNames", {**NAMES, "patternProperties": {"y": {}}, "propertyNames": {"const": "x"}}, {"y": "s"}),
    (
        "patternProperties with several",
        {"type": "object", "patternProperties": {"^x": INTEGER, "^xy": TEXT}},
        {"xy": "s"},
    ),
    (
        "patternProperties beside properties",
        {"type": "object", "properties": {"x": {}}, "patternProperties": {"^x": TEXT}},
        {"x": 1},
    ),
    *((f"format {name}", {**TEXT, "format": name}, "( {") for name in sorted(UNREAD_FORMATS)),
]  # fmt: skip
"""The named keyword, a schema, and a value that violates it."""
READ: list[tuple[dict[str, Any], Any, Any]] = [
    ({**INTEGER, "minimum": 3, "exclusiveMaximum": 7}, 7, 3),
    ({"type": "number", "exclusiveMinimum": 3, "maximum": 7.5}, 3, 7.5),
    ({**TEXT, "minLength": 2, "maxLength": 3}, "abcd", "ab"),
    ({**TEXT, "pattern": r"^\(?=[a-c]$"}, "(b", "(=b"),
    ({**TEXT, "pattern": "^a+$", "minLength": 0}, "b", "a"),
    ({**TEXT, "format": "made-up", "maxLength": 3}, "abcd", "abc"),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, 3, 6),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2, "uniqueItems": False}, [], [1, 1]),
    ({"type": "array", "prefixItems": [INTEGER], "items": TEXT}, [1, 2], [1, "x"]),
    ({"items": INTEGER, "minItems": 2}, [1], [1, 1]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [1, 2], [1]),
    ({**TWO, "required": ["b"], "additionalProperties": False}, {"a": 1}, {"b": 1}),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, {}, {"a": 1}),
    ({**NAMES, "minProperties": 1, "maxProperties": 2}, {}, {"x": 1}),
    ({**NAMES, "propertyNames": {"maxLength": 1}}, {"xy": 1}, {"x": 1}),
    ({**NAMES, "propertyNames": {"enum": ["x"]}}, {"y": 1}, {"x": 1}),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, {"x": "s"}, {"x": 1}),
    ({**TEXT, "enum": ["a", "b"], "format": "made-up"}, "c", "a"),
    ({"type": ["string", "null"], "enum": ["a", None]}, "c", None),
    ({"type": "number", "enum": [1, 2.5]}, 3, 1),
    ({"const": 3, **INTEGER}, 4, 3),
    ({**TEXT, "oneOf": [{"const": "a"}, {"enum": ["b"]}]}, "c", "b"),
    ({"type": "object", "anyOf": [{"properties": {"a": INTEGER}}]}, {"a": "x"}, {"a": 1}),
    ({"type": "object", "anyOf": [TWO]}, 3, {"a": 1}),
    ({**KINDS, "type": "string", "anyOf": [{"$ref": "#/$defs/text"}]}, 3, "x"),
    ({**KINDS, "allOf": [{"$ref": "#/$defs/text"}], "description": "x", "default": "y"}, 3, "x"),
    ({**KINDS, "$ref": "#/$defs/text", "title": "x"}, 3, "x"),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 3, None),
    ({"properties": {"not": INTEGER, "if": TEXT}, "required": ["not"]}, {"if": "x"}, {"not": 1}),
    ({"properties": {"uniqueItems": {"type": "boolean"}}, "default": {"not": 1}}, {"not": 1}, {}),
    ({"$defs": {"unused": {"not": {}}}, **TEXT, "examples": [{"not": {}}]}, 1, "x"),
    ({"const": {"not": 1}}, {"not": 2}, None),
]  # fmt: skip
"""A schema, a value that violates it, and one that satisfies it."""


def accepts(schema: dict[str, Any], value: Any) -> bool:
    xgrammar = pytest.importorskip("xgrammar")
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=BLANKS)
    testing = pytest.importorskip("xgrammar.testing")
    return bool(testing._is_grammar_accept_string(grammar, json.dumps(value)))


@pytest.mark.parametrize(("words", "schema", "misfit"), READ_OVER, ids=str)
def test_what_is_read_over_is_refused_by_name(words: str, schema: dict[str, Any], misfit: Any) -> None:
    """The compiler would accept the violating value, wherever in a schema the keyword is."""
    assert accepts(schema, misfit)
    within = {"type": "object", "properties": {"p": {"type": "array", "items": {**schema, "$defs": {}}}}}
    within["$defs"] = schema.get("$defs", {})
    for given, place in ((schema, "#"), (within, "#/properties/p/items"), (json.dumps(schema), "#")):
        with pytest.raises(ConfigError) as caught:
            Structure(json_schema=given)
        assert caught.value.field == "json_schema"
        assert str(caught.value).startswith(f"json_schema: unsupported: {words}") and f"(at {place}" in str(
            caught.value
        )


@pytest.mark.parametrize(("schema", "misfit", "fits"), READ, ids=str)
def test_what_is_read_is_not_refused(schema: dict[str, Any], misfit: Any, fits: Any) -> None:
    assert unread(schema) is None
    assert not accepts(schema, misfit) and (fits is None or accepts(schema, fits))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_that_is_known_binds(name: str) -> None:
    assert not accepts({**TEXT, "format": name}, "( {") and unread({**TEXT, "format": name}) is None


def test_alternatives_that_may_both_fit_count_as_any_of() -> None:
    both = {"oneOf": [{**INTEGER, "minimum": 0}, {**INTEGER, "maximum": 5}]}
    assert unread(both) is None and accepts(both, 3)


def test_the_documentation_names_what_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    (paragraph,) = (part for part in page.split("\n\n") if part.startswith("Schemas that xgrammar"))
    named = {*re.findall(r"`([$\w-]+)`", paragraph)}
    assert {*NEVER, *HEADS, *UNREAD_FORMATS, *(word for pair in BESIDE for word in pair)} <= named
    assert {words.split()[0] for words, *_ in READ_OVER if not words.startswith(("a ", "format"))} <= named


def test_references_are_followed_once() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "up": {"$ref": "#"}}}
    nodes = {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}
    assert unread({**tree, "$defs": nodes}) is None
    nodes["node"]["uniqueItems"] = True  # type: ignore[assignment]
    assert "unsupported: uniqueItems (at #/$defs/node)" in str(unread({**tree, "$defs": nodes}))


def test_schemas_between_tags_are_read_too() -> None:
    content = {"type": "json_schema", "json_schema": {"type": "array", "items": {}, "uniqueItems": True}}
    tag = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    form = {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag]}}
    for given in (form, json.dumps(form)):
        with pytest.raises(ConfigError, match=r"^structural_tag: unsupported: uniqueItems") as caught:
            Structure(structural_tag=given)
        assert caught.value.field == "structural_tag"
    content["json_schema"] = {"type": "array", "items": {}}
    Structure(structural_tag=form)


WORDS = [
    "type",
    "properties",
    "items",
    "anyOf",
    "allOf",
    "enum",
    "const",
    "required",
    "$ref",
    "format",
    "pattern",
]
WORDS += ["patternProperties", "propertyNames", "not", "uniqueItems", "minLength", "minimum", "prefixItems"]
VALUES = some.recursive(
    some.sampled_from(
        [None, True, False, 0, 3, "string", "object", "#", "#/items", "#/x/y", "date", "", 1.5]
    ),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=20,
)


@hypothesis.given(VALUES)
def test_whatever_comes_as_a_schema_is_read(schema: Any) -> None:
    """Invalid schemas are left to the compiler to refuse."""
    found = unread(schema)
    assert found is None or re.match(r"unsupported: .* \(at #", found, re.DOTALL)


def test_each_part_of_a_schema_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """References to each of many levels lead to the lowest as often; repeated visits took seconds."""
    looked: list[int] = []

    def look(own: Any, root: Any) -> str | None:
        looked.append(id(own))
        return look_at(own, root)

    look_at = json_schema._unread
    monkeypatch.setattr(json_schema, "_unread", look)
    lowest: dict[str, Any] = {"anyOf": [{"const": i} for i in range(50)]}
    levels = lowest
    for _ in range(30):
        levels = {"items": levels}
    references = [{"$ref": "#/items" + "/items" * i} for i in range(30)]
    assert unread({"type": "array", "prefixItems": references, "items": levels}) is None
    assert len(looked) == len({*looked}) == 1 + 30 + 30 + 1 + 50
