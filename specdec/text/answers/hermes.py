"""Calls as JSON between tags: Hermes 2 and 3, Qwen2.5, Qwen3."""

import json
from collections.abc import Sequence

from specdec.text.answers.calls import Schemas, close, stream_value
from specdec.text.answers.events import Arguments, Begin
from specdec.text.answers.source import MalformedCall, Reading, Source, Waiting

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; arguments are sent as they come."""

    openings: Sequence[str] = (OPENING,)
    sign = OPENING
    style = "json"

    def read(self, source: Source, schemas: Schemas) -> Reading[None]:
        yield from source.need(OPENING)
        name, arguments = yield from _head(source)
        source.settle()
        yield Begin(name)
        if arguments is None:
            yield from stream_value(source, CLOSING)
            yield from close(source, "}", CLOSING)
        else:
            yield Arguments(arguments)
            yield from close(source, CLOSING)

    def frame(self, name: str) -> tuple[str, str]:
        head = json.dumps(name, ensure_ascii=False)
        return f'{OPENING}\n{{"name": {head}, "arguments": ', f"}}\n{CLOSING}"


def _head(source: Source) -> Waiting[tuple[str, str | None]]:
    """Read a call up to its arguments, where they come last as an object; else all of it, with them."""
    name, arguments = "", ""
    yield from source.space()
    yield from source.need("{")
    while True:
        yield from source.space()
        key = yield from source.string()
        yield from source.space()
        yield from source.need(":")
        yield from source.space()
        if key == "name" and not name:
            name = yield from source.string()
        elif key != "arguments" or arguments:
            raise MalformedCall
        elif name and (yield from source.sees("{")):
            return name, None
        else:
            arguments = yield from _whole(source)
        yield from source.space()
        if (yield from source.need(",", "}")) == "}":
            if not name:
                raise MalformedCall
            return name, arguments or "{}"


def _whole(source: Source) -> Waiting[str]:
    """Read arguments that are not to be sent yet: before the name, as a string of JSON, or null."""
    if (yield from source.match("null")):
        return "{}"
    text = ""
    for piece in source.value(CLOSING):
        text += piece or ""
        if piece is None:
            yield None
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value)
    except (ValueError, RecursionError):
        raise MalformedCall from None
    if not isinstance(value, dict):
        raise MalformedCall
    return text
