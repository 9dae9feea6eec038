"""Calls as JSON objects, one or several after one opening."""

import json
from collections.abc import Callable, Sequence

from specdec.text.answers.calls import CallFormat, Schemas, close, stream_value
from specdec.text.answers.events import ArgumentsDelta, CallStart
from specdec.text.answers.source import MalformedCall, Reading, TextCursor, Waiting


class JsonList(CallFormat):
    """`OPENING[{"name": …, "arguments": {…}}, …]CLOSING`: Nemotron-H, Granite 3, early Mistral."""

    between = ", "

    def __init__(self, *openings: str, sign: str, closing: str = "") -> None:
        self.openings: Sequence[str] = openings
        self.sign, self._closing = sign, closing
        self.before, self.behind = f"{openings[0]}[", f"]{closing}"

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(*self.openings)
        yield from source.space()
        yield from read_list(source)
        if self._closing:
            yield from close(source, self._closing)

    def frame(self, name: str) -> tuple[str, str]:
        return json_frame(name, "arguments")


class LeadingJson(CallFormat):
    """`{"name": …, "parameters": {…}}; …` from the start of the answer: Llama 3."""

    openings: Sequence[str] = ("<|python_tag|>", "{")
    sign = "dictionary of argument name and its value"
    leads = True
    between = "; "

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.match(self.openings[0])
        yield from source.space()
        yield from read_several(source, lambda: read_object(source, "", ("parameters", "arguments")), ";")

    def frame(self, name: str) -> tuple[str, str]:
        return json_frame(name, "parameters")


def json_frame(name: str, key: str) -> tuple[str, str]:
    """Return the text before and after the arguments within a call object."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ', "}"


def read_several(source: TextCursor, read: Callable[[], Reading[None]], between: str) -> Reading[None]:
    """Parse consecutive calls. Only a failure of the first means that there is no call at all."""
    yield from read()
    while True:
        yield from source.space()
        if between and not (yield from source.match(between)):
            break
        yield from source.space()
        begin = source.at
        try:
            yield from read()
        except MalformedCall:
            if source.cut and (between or source.at > begin):  # the call was cut off
                source.take(len(source.text))
            break
    source.at = 0


def read_list(source: TextCursor) -> Reading[None]:
    """Parse a list of calls, and its closing bracket if present."""
    yield from source.need("[")
    yield from source.space()
    yield from read_several(source, lambda: read_object(source, ""), ",")
    yield from close(source, "]")


def read_object(source: TextCursor, closing: str, keys: Sequence[str] = ("arguments",)) -> Reading[None]:
    """Parse a call; arguments are streamed, and end at the closing tag at the latest."""
    name, arguments = yield from _head(source, closing, keys)
    source.settle()
    yield CallStart(name)
    if arguments is not None:
        yield ArgumentsDelta(arguments)
        return
    yield from stream_value(source, closing)
    yield from _pass_rest(source)


def _head(source: TextCursor, closing: str, keys: Sequence[str]) -> Waiting[tuple[str, str | None]]:
    """Parse a call up to its arguments if they are a trailing object; otherwise parse all of it."""
    name, arguments = "", ""
    yield from source.need("{")
    while True:
        yield from source.space()
        key = yield from source.string()
        yield from source.space()
        yield from source.need(":")
        yield from source.space()
        if key == "name" and not name:
            name = yield from source.string()
        elif key not in keys or arguments:
            raise MalformedCall
        elif name and (yield from source.sees("{")):
            return name, None
        else:
            arguments = yield from _whole(source, closing)
        yield from source.space()
        if (yield from source.need(",", "}")) == "}":
            if not name:
                raise MalformedCall
            return name, arguments or "{}"


def _whole(source: TextCursor, closing: str) -> Waiting[str]:
    """Parse arguments that cannot be streamed: before the name, as a JSON string, or null."""
    if (yield from source.match("null")):
        return "{}"
    text = ""
    for chunk in source.value(closing):
        text += chunk or ""
        if chunk is None:
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


def _pass_rest(source: TextCursor) -> Waiting[None]:
    """Consume the keys after the arguments, such as the call's id, and the end of the object."""
    yield from source.space()
    try:
        while (yield from source.match(",")):
            yield from source.space()
            yield from source.string()
            yield from source.space()
            yield from source.need(":")
            yield from source.space()
            yield from source.string()
            yield from source.space()
        yield from source.need("}")
        source.settle()
    except MalformedCall:
        source.at = 0
