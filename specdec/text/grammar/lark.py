"""Translation of structured outputs to llguidance's grammars: JSON schemas, EBNF and structural tags."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from specdec.text.answers.schema import types_of

OPTIONS = {"whitespace_pattern": "[ \\n]?", "coerce_one_of": True, "lenient": True}
"""At most one whitespace character between two JSON tokens: small models start to indent and never stop.
Lenient: unsupported keywords are warnings, so that formats that only describe can be told apart."""
HARMLESS = ("Unknown format", "oneOf not fully supported")
"""Warnings about schemas that are accepted."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
PARTS = ("anyOf", "oneOf", "allOf", "items", "prefixItems", "additionalProperties", "unevaluatedProperties")
"""Keywords that contain schemas, one or several."""
COMPOSED = {"properties", "$ref", "anyOf", "oneOf"}
EBNF = re.compile(
    r'(?P<kept>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|#[^\n]*|\s*\n\s*(?=\|)|\{\s*(?=,)', re.DOTALL
)
"""Literals and classes, and what llguidance's converter does not parse: comments, a `|` that begins a line,
and counts without a minimum."""
SIGN = re.compile(r"\\(?:x..|.)|.", re.DOTALL)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(-)|.)", re.DOTALL)
XML = {
    "qwen_xml": ("<parameter={}>\n", "<parameter={}>\n", "\n</parameter>"),
    "deepseek_xml": (
        '<｜DSML｜parameter name="{}" string="true">',
        '<｜DSML｜parameter name="{}" string="false">',
        "</｜DSML｜parameter>",
    ),
}
"""What begins a string, what begins another value, and what ends both, by style."""
TAG = {"begin", "content", "end"}
KEYS = {
    **{"const_string": {"value"}, "regex": {"pattern"}, "grammar": {"grammar", "syntax"}, "any_text": set()},
    **{"json_schema": {"json_schema", "style", "max_whitespace_cnt"}, "tag": TAG, "token": {"token"}},
    **{"qwen_xml_parameter": {"json_schema"}, "sequence": {"elements"}, "or": {"elements"}},
    **{"optional": {"content"}, "plus": {"content"}, "star": {"content"}},
    "repeat": {"content", "min", "max"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first"},
    "tags_with_separator": {"separator", "tags", "at_least_one", "stop_after_first"},
}  # fmt: skip
"""Supported keys of a structural tag's parts, by type."""
SUFFIX = {"optional": "?", "plus": "+", "star": "*"}


def to_llguidance(kind: str, source: str) -> str:
    """Return a structured output's grammar as llguidance takes it; raise ValueError if it is malformed."""
    match kind:
        case "json_schema":
            return json.dumps({"grammars": [{"json_schema": prepared(json.loads(source))}]})
        case "json_object":
            return to_llguidance("json_schema", '{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            return "start: " + " | ".join(map(json.dumps, json.loads(source)))
        case "grammar":
            return source if is_lark_syntax(source) else gbnf_to_lark(EBNF.sub(_plain, source))
        case _:
            return Tags().grammar(json.loads(source))


def prepared(schema: Any) -> dict[str, Any]:
    """Return a schema without idle keywords; unless it composes, nothing but what it lists is allowed."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema has to be an object")
    parts = list(_parts(schema))
    closes = not any("allOf" in part or len(part.keys() & COMPOSED) > 1 for part in parts)
    for part in parts:
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        if (names := _name_pattern(part)) is not None:
            del part["propertyNames"]
            if names:
                part["patternProperties"] = {names: part.get("additionalProperties", {})}
                part["additionalProperties"] = False
        properties, required = part.get("properties"), part.get("required", ())
        if (
            closes
            and isinstance(properties, dict)
            and not [name for name in required if name not in properties]
        ):
            part.setdefault("additionalProperties", part.pop("unevaluatedProperties", False))
        if closes and "prefixItems" in part:
            part.setdefault("items", part.pop("unevaluatedItems", False))
    return {**schema, "x-guidance": OPTIONS}


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas. Properties may be named like keywords."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += [
                part for word in MAPS if isinstance(node.get(word), dict) for part in node[word].values()
            ]
            stack += [node[word] for word in PARTS if word in node]
        elif isinstance(node, list):
            stack += node


def _name_pattern(schema: Mapping[str, Any]) -> str | None:
    """Return a pattern for all names of an object, "" if any will do, or None if there is no such pattern."""
    names = schema.get("propertyNames")
    match {} if names is True else names:
        case {"enum": [*values], **rest} if not {*rest} - {"type"} and all(
            isinstance(v, str) for v in values
        ):
            pattern = f"^(?:{'|'.join(map(re.escape, values))})$"
        case {"pattern": str(pattern), **rest} if not {*rest} - {"type"}:
            pass
        case dict() if names in (True, {}, {"type": "string"}):
            return ""
        case _:
            return None
    return None if schema.keys() & {"properties", "patternProperties"} else pattern


def _plain(match: re.Match[str]) -> str:
    """Return a part of a grammar as the converter takes it; a literal by characters, see `literal`."""
    if not (token := match["kept"]):
        return " " if match[0].isspace() else "{0" if match[0][0] == "{" else ""
    token = ESCAPE.sub(_character, token)
    signs = SIGN.findall(token[1:-1]) if token[0] == '"' else []
    return "({})".format(" ".join(f'"{sign}"' for sign in signs)) if len(signs) > 1 else token


def _character(match: re.Match[str]) -> str:
    """Return an escaped character in a way that both literals and classes understand."""
    if not (code := match[1] or match[2] or (match[3] and "2d")):
        return match[0]
    return chr(int(code, 16)) if int(code, 16) > 0x7F else f"\\x{int(code, 16):02x}"


def literal(text: str) -> str:
    """Return an expression for a text, by characters: of two that begin alike the longer would win."""
    return " ".join(map(json.dumps, text)) or '""'


class Tags:
    """Build a Lark grammar of a structural tag, with a rule for each part that needs one."""

    def __init__(self) -> None:
        self._rules = ["TEXT: /(?s:.*)/"]
        self._grammars: list[dict[str, str]] = []
        self._numbers = count()

    def grammar(self, tag: Mapping[str, Any]) -> str:
        form = tag.get("format")
        if "structures" in tag:  # the older form
            tags = [
                {"type": "tag", "begin": own["begin"], "end": own["end"]}
                | {"content": {"type": "json_schema", "json_schema": own["schema"]}}
                for own in tag["structures"]
            ]
            form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
        start = f"start: {self._form(form)}"
        lark = {"name": "tags", "lark_grammar": "\n".join([start, *self._rules])}
        return json.dumps({"grammars": [lark, *self._grammars]})

    def _form(self, node: Any) -> str:
        """Return an expression for one part."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        if kind not in KEYS:
            raise ValueError(f"unsupported: format {kind!r:.40}; use one of {', '.join(KEYS)}")
        if unknown := [key for key in node if node[key] and key not in KEYS[kind] | {"type"}]:
            raise ValueError(f"unsupported: {unknown[0]} in format {kind}")
        match kind:
            case "const_string":
                return literal(node["value"])
            case "any_text":
                return "TEXT"
            case "regex":
                return self._named(LLMatcher.grammar_from_regex(node["pattern"]))
            case "grammar":
                return self._named(to_llguidance("grammar", node["grammar"]))
            case "token":
                return f"<[{node['token']}]>" if isinstance(node["token"], int) else node["token"]
            case "json_schema" | "qwen_xml_parameter":
                return self._values(node)
            case "tag":
                return self._tag(node, node["begin"])
            case "sequence":
                return "({})".format(" ".join(map(self._form, node["elements"])))
            case "or":
                return "({})".format(" | ".join(map(self._form, node["elements"])))
            case "repeat":
                most = "" if node["max"] < 0 else node["max"]
                return f"({self._form(node['content'])}){{{node['min']},{most}}}"
            case "triggered_tags" | "tags_with_separator":
                return self._several(node)
            case _:
                return f"({self._form(node['content'])}){SUFFIX[kind]}"

    def _several(self, node: Mapping[str, Any]) -> str:
        once, always = node.get("stop_after_first"), node.get("at_least_one")
        if "triggers" not in node:
            one = self._rule(" | ".join(map(self._form, node["tags"])))
            many = one if once else f"{one} ({literal(node['separator'])} {one})*"
            return f"({many})" if always else f"({many})?"
        options = []
        for trigger in node["triggers"]:
            behind = [tag for tag in node["tags"] if tag["begin"].startswith(trigger)]
            if behind:
                opening = self._lazy("(?s:.*)", trigger)
                options += [f"{opening} {self._tag(tag, tag['begin'][len(trigger) :])}" for tag in behind]
        one = self._rule(" | ".join(options))
        if once:
            return one if always else f"({one} | TEXT)"
        return f"({one}{'+' if always else '*'} TEXT)"

    def _tag(self, own: Mapping[str, Any], begin: Any) -> str:
        content, ends = own["content"], own["end"] if isinstance(own["end"], list) else [own["end"]]
        start = self._form(begin) if isinstance(begin, Mapping) else literal(begin)
        if content.get("type") == "any_text" and all(isinstance(end, str) and end for end in ends):
            return f"{start} ({' | '.join(self._lazy('(?s:.*)', end) for end in ends)})"
        behind = [self._form(end) if isinstance(end, Mapping) else literal(end) for end in ends]
        return f"{start} {self._form(content)} ({' | '.join(behind)})"

    def _values(self, own: Mapping[str, Any]) -> str:
        """Return JSON, or an object's properties in XML: strings as they are, all other values as JSON."""
        schema, kind = own["json_schema"], own["type"]
        style = own.get("style", "qwen_xml" if kind == "qwen_xml_parameter" else "json")
        if style == "json":
            return f"%json {json.dumps(prepared(schema))}"
        if style not in XML:
            raise ValueError(f"unsupported: style {style!r:.40}; use json or one of {', '.join(XML)}")
        if schema.get("type", "object") != "object":
            raise ValueError(f"Invalid type: {schema['type']!r:.40}; only an object has parameters")
        text, other, end = XML[style]
        required = schema.get("required", ())
        behind, first = '""', '""'
        for name, value in reversed(schema.get("properties", {}).items()):
            if "string" in types_of(schema, name):
                one = f"{literal(text.format(name))} {self._lazy(_content(value), end)}"
            else:
                inner = prepared({"$defs": schema.get("$defs", {}), **value} if "$defs" in schema else value)
                one = f"{literal(other.format(name))} %json {json.dumps(inner)} {literal(end)}"
            one = self._rule(one)
            needed = name in required
            first = self._rule(f"{one} {behind}" + ("" if needed else f" | {first}"))
            behind = self._rule(f'"\\n" {one} {behind}' + ("" if needed else f" | {behind}"))
        return first

    def _rule(self, body: str) -> str:
        name = f"r{next(self._numbers)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _lazy(self, content: str, end: str) -> str:
        """Return a rule for a text up to the first end."""
        name = f"r{next(self._numbers)}"
        pattern = content.replace("\n", r"\n") + re.escape(end).replace("\n", "n")
        self._rules.append(f"{name}[lazy]: /{regex_to_lark(pattern, '')}/")
        return name

    def _named(self, grammar: str) -> str:
        name = f"g{next(self._numbers)}"
        own = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        self._grammars.append({**own, "name": name})
        return f"@{name}"


def _content(schema: Any) -> str:
    """Return a regular expression for a string's text."""
    if not isinstance(schema, Mapping):
        return "(?s:.*)"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        return f"(?:{'|'.join(map(re.escape, texts))})"
    if isinstance(pattern := schema.get("pattern"), str):
        start, stop = (
            ("" if pattern.startswith("^") else "(?s:.*)"),
            ("" if pattern.endswith("$") else "(?s:.*)"),
        )
        return f"{start}(?:{pattern.removeprefix('^').removesuffix('$')}){stop}"
    return f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
