"""Grammars of each kind: what they accept, what is refused by name, and what specdec adds to a schema."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec.text.grammar.child import Vocabulary, compile_grammar
from specdec.text.grammar.wire import Job, Kind
from tests.text.grammars import accepts

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TWO = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
NAMES = {"type": "object", "additionalProperties": INTEGER}
KINDS = {"$defs": {"text": TEXT}}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("not", {**TEXT, "not": {"const": "x"}}),
    ("if", {**TWO, "if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    ("uniqueItems", {"type": "array", "items": INTEGER, "uniqueItems": True}),
    ("contains", {"type": "array", "items": INTEGER, "contains": {"const": 5}}),
    ("dependentRequired", {**TWO, "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {**TWO, "dependentSchemas": {"a": {"required": ["b"]}}}),
    ("$dynamicRef", {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", **TEXT}}}),
    ("$recursiveRef", {"type": "object", "properties": {"a": {"$recursiveRef": "#"}}}),
    ("https://example.com", {"$ref": "https://example.com/schema"}),
    ("look-ahead", {**TEXT, "pattern": "^(?!a)[a-z]*$"}),
    ("propertyNames", {**NAMES, "properties": {"y": INTEGER}, "propertyNames": {"pattern": "^x"}}),
    ("propertyNames", {**NAMES, "propertyNames": {"maxLength": 1}}),
    ("not disjoint", {"type": "object", "patternProperties": {"^x": INTEGER, "^xy": TEXT}}),
    ("unevaluatedProperties", {"allOf": [TWO], "unevaluatedProperties": False}),
]
"""A part of the message, and a schema that is refused wherever it is."""
UNSATISFIABLE: list[tuple[str, dict[str, Any]]] = [
    ("incompatible types", {**TEXT, "const": 1}),
    ("anyOf is empty", {"anyOf": []}),
    ("anyOf is empty", {"enum": []}),
    ("minimum (5) is greater", {**INTEGER, "minimum": 5, "maximum": 3}),
    ("Invalid type", {"type": "odd"}),
    ("no text matches this grammar", {"$ref": "#"}),
]
ENFORCED: list[tuple[dict[str, Any], Any, Any]] = [
    ({**INTEGER, "minimum": 3, "exclusiveMaximum": 7}, 7, 3),
    ({"type": "number", "exclusiveMinimum": 3, "maximum": 7.5}, 3, 7.5),
    ({"type": "number", "multipleOf": 0.5}, 0.3, 1.5),
    ({**INTEGER, "multipleOf": 7, "minimum": 0}, 8, 14),
    ({**TEXT, "minLength": 2, "maxLength": 3}, "abcd", "ab"),
    ({**TEXT, "pattern": r"^\(?=[a-c]$"}, "(b", "(=b"),
    ({**TEXT, "pattern": "b"}, "aaa", "abc"),
    ({**TEXT, "pattern": "^a+$", "minLength": 3}, "aa", "aaa"),
    ({**TEXT, "format": "date", "pattern": "^2"}, "1020-01-01", "2020-01-01"),
    ({**TEXT, "format": "made-up", "maxLength": 3}, "abcd", "abc"),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, 3, 6),
    ({"minimum": 3}, 2, "x"),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2, "uniqueItems": False}, [], [1, 1]),
    ({"type": "array", "prefixItems": [INTEGER], "items": TEXT}, [1, 2], [1, "x"]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, [1, 2], [1]),
    ({**TWO, "required": ["b"], "additionalProperties": False}, {"a": 1}, {"b": 1}),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, {}, {"a": 1}),
    ({**TWO, "required": ["a", "z"]}, {"a": 1}, {"a": 1, "z": 2}),
    ({**NAMES, "required": ["z"]}, {"y": 1}, {"z": 1}),
    ({**NAMES, "minProperties": 1, "maxProperties": 2}, {}, {"x": 1}),
    ({**NAMES, "propertyNames": {"enum": ["x", "y"]}}, {"z": 1}, {"x": 1, "y": 2}),
    ({**NAMES, "propertyNames": {**TEXT, "pattern": "^x"}}, {"y": 1}, {"xy": 1}),
    ({**NAMES, "propertyNames": TEXT}, {"x": "s"}, {"x": 1}),
    ({"type": "object", "patternProperties": {"^x": INTEGER}}, {"x": "s"}, {"x": 1}),
    ({"type": "object", "properties": {"x": {}}, "patternProperties": {"^x": TEXT}}, {"x": 1}, {"x": "s"}),
    ({**TEXT, "enum": ["a", 1]}, 1, "a"),
    ({"enum": ["a", "bbb"], "minLength": 2}, "a", "bbb"),
    ({"enum": ["a", "b"], "anyOf": [{"const": "a"}]}, "b", "a"),
    ({"const": {"properties": {}}}, {"properties": 2}, {"properties": {}}),
    ({**TEXT, "oneOf": [{"const": "a"}, {"enum": ["b"]}]}, "c", "b"),
    ({**KINDS, "$ref": "#/$defs/text", "minLength": 3}, "x", "xxx"),
    ({"$defs": {"text": {"$anchor": "here", **TEXT}}, "$ref": "#here"}, 1, "x"),
    ({"allOf": [{**TEXT, "minLength": 2}, {**TEXT, "maxLength": 3}]}, "x", "xx"),
    ({"allOf": [TWO, {"properties": {"c": TEXT}, "required": ["c"]}]}, {"a": 1}, {"a": 1, "c": "x"}),
    ({"properties": {"not": INTEGER, "if": TEXT}, "required": ["not"]}, {"if": "x"}, {"not": 1}),
    ({"$defs": {"unused": {"not": {}}}, **TEXT, "examples": [{"not": {}}]}, 1, "x"),
]
"""A schema, a value that violates it, and one that satisfies it."""


@pytest.mark.parametrize(("says", "schema"), [*REFUSED, *UNSATISFIABLE], ids=str)
def test_a_schema_that_is_not_enforced_is_refused(
    says: str, schema: dict[str, Any], vocabulary: Vocabulary
) -> None:
    within = {"type": "array", "items": {**schema, "$defs": {}}, "$defs": schema.get("$defs", {})}
    for own in (schema, within) if (says, schema) in REFUSED else (schema,):
        with pytest.raises(ValueError, match=re.escape(says)):
            compile_grammar(vocabulary, "json_schema", json.dumps(own))


@pytest.mark.parametrize(("schema", "misfit", "fits"), ENFORCED, ids=str)
def test_a_schema_is_enforced(schema: dict[str, Any], misfit: Any, fits: Any, vocabulary: Vocabulary) -> None:
    assert not accepts(vocabulary, "json_schema", schema, json.dumps(misfit))
    assert accepts(vocabulary, "json_schema", schema, json.dumps(fits))
    within = {"type": "array", "items": {**schema, "$defs": {}}, "$defs": schema.get("$defs", {})}
    assert not accepts(vocabulary, "json_schema", within, json.dumps([fits, misfit]))
    assert accepts(vocabulary, "json_schema", within, json.dumps([fits, fits]))


def test_a_schema_allows_only_listed_properties_unless_it_composes(vocabulary: Vocabulary) -> None:
    for schema, closed in (
        (TWO, True),
        ({**TWO, "additionalProperties": INTEGER}, False),
        ({**TWO, "unevaluatedProperties": INTEGER}, False),
        ({"allOf": [TWO]}, False),
        ({**TWO, "anyOf": [{"properties": {"c": INTEGER}}]}, False),
        ({"anyOf": [TWO]}, True),
    ):
        assert accepts(vocabulary, "json_schema", schema, '{"a": 1, "c": 2}') != closed, schema
    pair = {"type": "array", "prefixItems": [INTEGER]}
    assert not accepts(vocabulary, "json_schema", pair, "[1, 2]")
    assert accepts(vocabulary, "json_schema", {**pair, "items": {}}, "[1, 2]")


@pytest.mark.parametrize(
    "name", ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)
def test_a_format_that_is_known_binds(name: str, vocabulary: Vocabulary) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    assert f"`{name}`" in page
    assert not accepts(vocabulary, "json_schema", {**TEXT, "format": name}, '"( {"')


def test_json_has_no_runs_of_blanks(vocabulary: Vocabulary) -> None:
    assert accepts(vocabulary, "json_object", "true", '{\n"a" : [ 1,\n2]}')
    for text in ('{  "a": 1}', '{"a": \n1}', '{"a":\t1}'):
        assert not accepts(vocabulary, "json_object", "true", text)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "(" root ")" | "x"', "((x))"),
        (r'root ::= "\u00e9\x41" [\u0041-\u0043\U0001F642]', "éA🙂"),
        ('root ::= "x"{,5}', "xx"),
        ('# one\nroot ::= "a" # "two"\n  | "#b" # c\n', "#b"),
        (r"root ::= [a\-\]]+", "-a]"),
        ('root ::= [a-z]+ "b"', "aab"),
        ('start: "a" /b+/', "abb"),
    ],
)
def test_grammars_in_ebnf_and_lark(grammar: str, text: str, vocabulary: Vocabulary) -> None:
    assert accepts(vocabulary, "grammar", grammar, text)
    assert not accepts(vocabulary, "grammar", grammar, f"{text}!")


def test_choices_may_begin_alike(vocabulary: Vocabulary) -> None:
    for text in ("a", "ab", "abc", '"\\\n', "🙂𝒳"):
        assert accepts(vocabulary, "choice", ["a", "ab", "abc", '"\\\n', "🙂𝒳"], text)


CALL = {
    "type": "tag",
    "begin": "<f=a>",
    "content": {"type": "json_schema", "json_schema": INTEGER},
    "end": "</f>",
}
XML = {
    "type": "object",
    "required": ["b"],
    "properties": {"a": {**TEXT, "maxLength": 3}, "b": {"enum": ["x"]}},
}

VALUE = "<parameter=b>\nx\n</parameter>"


def literal(text: str) -> dict[str, str]:
    return {"type": "const_string", "value": text}


@pytest.mark.parametrize(
    ("part", "fits", "misfits"),
    [
        (CALL, ["<f=a>3</f>"], ["<f=a></f>", "3"]),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL]},
            ["", "x", "x <f=a>3</f> y <f=a>4</f>"],
            ["<f=b>3</f>", "x <f=a>y</f>"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "at_least_one": True},
            ["x <f=a>3</f>"],
            ["x"],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<f="], "tags": [CALL], "stop_after_first": True},
            ["x", "x <f=a>3</f>"],
            ["<f=a>3</f> y"],
        ),
        (
            {"type": "tags_with_separator", "separator": ", ", "tags": [CALL]},
            ["", "<f=a>3</f>, <f=a>4</f>"],
            ["<f=a>3</f>, "],
        ),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": ["</t>", "</u>"]},
            ["<t>a</b></u>", "<t></t>"],
            ["<t></t></t>", "<t>a"],
        ),
        ({"type": "sequence", "elements": [literal("a"), {"type": "any_text"}]}, ["a", "abc"], ["b"]),
        (
            {"type": "or", "elements": [literal("a"), {"type": "regex", "pattern": r"\d/b"}]},
            ["a", "3/b"],
            [""],
        ),
        ({"type": "star", "content": literal("ab")}, ["", "abab"], ["aba"]),
        ({"type": "plus", "content": literal("ab")}, ["ab", "abab"], [""]),
        ({"type": "optional", "content": literal("ab")}, ["ab", ""], ["abab"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": literal("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}, ["((x))"], ["(x"]),
        (
            {"type": "json_schema", "style": "qwen_xml", "json_schema": XML},
            [f"<parameter=a>\na/<\n</parameter>\n{VALUE}", VALUE],
            ["<parameter=a>\nabc\n</parameter>", "", "<parameter=b>\nz\n</parameter>"],
        ),
    ],
    ids=lambda own: own["type"] if isinstance(own, dict) else "",
)  # fmt: skip
def test_structural_tags(part: Any, fits: list[str], misfits: list[str], vocabulary: Vocabulary) -> None:
    tag = {"type": "structural_tag", "format": part}
    assert [text for text in fits if not accepts(vocabulary, "structural_tag", tag, text)] == []
    assert [text for text in misfits if accepts(vocabulary, "structural_tag", tag, text)] == []


def test_structural_tags_of_the_older_kind(vocabulary: Vocabulary) -> None:
    own = {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"}
    tag = {"type": "structural_tag", "structures": [own], "triggers": ["<f="]}
    assert accepts(vocabulary, "structural_tag", tag, "x <f=a>3</f> y")
    assert not accepts(vocabulary, "structural_tag", tag, "x <f=a>z</f> y")


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "dispatch"}, "format 'dispatch'"),
        ({"type": "const_string"}, "malformed"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes in format any_text"),
        ({"type": "json_schema", "style": "glm_xml", "json_schema": {}}, "style 'glm_xml'"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "not"),
        (None, "format None"),
    ],
    ids=str,
)
def test_a_structural_tag_that_is_not_enforced_is_refused(
    part: Any, says: str, vocabulary: Vocabulary
) -> None:
    with pytest.raises(ValueError, match=says):
        compile_grammar(vocabulary, "structural_tag", json.dumps({"format": part}))


def test_a_draft_that_leads_nowhere_costs_its_output_nothing(vocabulary: Vocabulary) -> None:
    """A matcher of llguidance cannot leave an error; the output's is then made again."""
    follower = compile_grammar(vocabulary, "regex", r"ab|xx[yz]{200000}")
    a, b, x = (vocabulary.tokenizer.tokenize_str(sign)[0] for sign in "abx")
    answer = follower.answer(Job(0, [], [(x, x, x), (a,)]))
    assert answer and follower.answer(Job(0, [a, b], [(), (0,)]))[-1] == Kind.OVER  # type: ignore[index]
