"""Calls as elements, one for each parameter: Qwen3-Coder, Qwen3.5, Nemotron 3."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.text.answers.calls import CallFormat, Schemas, close, stream_value
from specdec.text.answers.events import ArgumentsDelta, CallStart
from specdec.text.answers.schema import as_json, types_of
from specdec.text.answers.source import MalformedCall, Reading, TextCursor, Waiting

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER = "<parameter="
ENDS = tuple(f"{before}{end}" for end in ("</parameter>", f"{END}\n{CLOSING}") for before in ("\n", ""))
"""Endings of a value. Models sometimes omit `</parameter>`; a lone tag may belong to the value."""


class Qwen3Coder(CallFormat):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

    Values are converted to JSON by their schema: strings are streamed, other values sent once complete. A
    JSON object in place of the parameters is accepted too.
    """

    openings: Sequence[str] = (OPENING, FUNCTION)
    sign = FUNCTION
    style = "qwen_xml"
    between = "\n"

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.match(OPENING)
        yield from source.space()
        yield from source.need(FUNCTION)
        name = yield from source.name()
        yield from source.space()
        first = yield from source.need(PARAMETER, END, CLOSING, "{")
        source.take(source.at - len(first))
        yield CallStart(name)
        if first == "{":
            yield from stream_value(source, END)
        else:
            schema = schemas.get(name, {})
            yield from read_parameters(source, PARAMETER, lambda: _head(source, schema), ENDS)
        yield from close(source, END, CLOSING)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{OPENING}\n{FUNCTION}{name}>\n", f"\n{END}\n{CLOSING}"


def _head(source: TextCursor, schema: Mapping[str, Any]) -> Waiting[tuple[str, set[str]]]:
    key = yield from source.name()
    yield from source.match("\n")
    return key, types_of(schema, key)


def read_parameters(
    source: TextCursor, opening: str, head: Callable[[], Waiting[tuple[str, set[str]]]], ends: Sequence[str]
) -> Reading[None]:
    """Send the parameters as one object; leave it open if it was cut off, so that it does not look complete.

    `head` parses the rest of a parameter's opening: its key, and the types that its value may have.
    """
    prefix = "{"
    while True:
        yield from source.space()
        if not (yield from source.match(opening)):
            break
        try:
            key, types = yield from head()
        except MalformedCall:
            if source.cut and ">" not in source.text.removeprefix(opening):
                source.take(len(source.text))
            break
        yield ArgumentsDelta(f"{prefix}{_quoted(key)}: ")
        prefix = ", "
        source.settle()
        if not (yield from _value(source, types, ends)):
            return
    source.at = 0
    if not source.cut:
        yield ArgumentsDelta("}" if prefix == ", " else "{}")


def _value(source: TextCursor, types: set[str], ends: Sequence[str]) -> Reading[bool]:
    """Send a parameter's value, streamed if it is a string; return whether it is complete."""
    streams = types == {"string"}
    pending, end = "", None
    yield ArgumentsDelta('"' if streams else "")
    while end is None:
        chunk, end = yield from source.chunk(ends)
        source.settle()
        if streams:
            yield ArgumentsDelta(_quoted(chunk)[1:-1])
        else:
            pending += chunk
    if not end and source.cut:
        return False
    yield ArgumentsDelta('"' if streams else as_json(pending, types))
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
