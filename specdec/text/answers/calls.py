"""Tool calls within an answer, in the model's own format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.text.answers.events import ArgumentsDelta, TextDelta
from specdec.text.answers.source import MalformedCall, Reading, TextCursor

UNFINISHED = re.compile(r"\s*[<\[][^<>\[\]\s]*\Z")
"""A tag that was cut off; within a call it is dropped."""
MOST_REREAD = 1 << 18
"""Maximum characters of failed calls to reparse; the rest of the answer is text, which bounds the work."""
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the functions' parameters, by function name."""


class CallFormat(Protocol):
    """A tool call format."""

    openings: Sequence[str]
    """Literals that open a call."""
    sign: str
    """Marker that identifies these models' chat templates."""

    style: str = "json"
    """Structural tags' name for the format of the arguments."""
    leads: bool = False
    """Whether calls are only recognised at the start of the answer."""
    before: str = ""
    between: str = ""
    behind: str = ""
    """Text before, between and after forced calls."""

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        """Parse a call from its opening to its end. Before its `CallStart` it may turn out to be text."""
        ...

    def frame(self, name: str) -> tuple[str, str]:
        """Return the text before and after the arguments of a forced call."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCallReader:
    """The call format of an answer and the functions' schemas."""

    form: CallFormat
    schemas: Schemas


def read_calls(source: TextCursor, calls: ToolCallReader) -> Reading[None]:
    """Separate text from calls. Whitespace around a call is part of it."""
    has_calls = False
    while True:
        position, opening = source.seek(calls.form.openings)
        length = len(source.text[:position].rstrip())
        if length:
            yield TextDelta(source.take(length))
            if calls.form.leads:
                yield from read_text(source)
                return
            has_calls = False
        if opening:
            source.at = position - length
            try:
                yield from calls.form.read(source, calls.schemas)
                has_calls = True
                if source.cut and UNFINISHED.match(source.text):
                    source.take(len(source.text))
            except MalformedCall:
                source.reread += source.at
                yield TextDelta(source.take(position - length + len(opening)))
                has_calls = False
                if source.reread > MOST_REREAD:
                    yield from read_text(source)
                    return
        elif source.ended:
            if source.text.strip() or (source.text and not has_calls):
                yield TextDelta(source.take(len(source.text)))
            return
        else:
            yield None


def read_text(source: TextCursor) -> Reading[None]:
    """Pass everything through as text."""
    while True:
        if source.text:
            yield TextDelta(source.take(len(source.text)))
        if source.ended:
            return
        yield None


def stream_value(source: TextCursor, closing: str) -> Reading[None]:
    """Stream the JSON of a call's arguments."""
    for piece in source.value(closing):
        yield None if piece is None else ArgumentsDelta(piece)
        if piece is not None:
            source.settle()


def close(source: TextCursor, *closings: str) -> Reading[None]:
    """Consume the closings of a call that are present; leave other text in place."""
    for closing in closings:
        yield from source.space()
        if (yield from source.match(closing)):
            source.settle()
        source.at = 0
