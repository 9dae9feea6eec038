"""Parse a streamed answer into text and tool calls."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specdec.server.tools.source import Arguments, Event, MalformedCall, Reading, Source, Text

UNFINISHED = re.compile(r"\s*<[^<>\s]*\Z")
"""A tag that was cut off. Within a call it is no text."""
Schemas = Mapping[str, Mapping[str, Any]]
"""What each function takes, as JSON schemas."""


class CallFormat(Protocol):
    """A tool call format."""

    openings: Sequence[str]
    """A call begins with one of them."""
    sign: str
    """Markers found only in the chat templates of these models."""

    style: str
    """xgrammar's name for the format of the arguments."""

    def read(self, source: Source, schemas: Schemas) -> Reading[None]:
        """Read a call from its opening to its end. What comes before its `Begin` may still be no call."""
        ...

    def frame(self, name: str) -> tuple[str, str]:
        """Return what stands before and behind the arguments of a call, for one that is forced."""
        ...


class Parser:
    """Read one answer. What was sent of a call stays; what turns out to be none comes as text, unchanged."""

    def __init__(self, form: CallFormat, schemas: Schemas) -> None:
        self._source = Source()
        self._steps = _read(self._source, form, schemas)

    def push(self, text: str) -> list[Event]:
        """Take the next piece, and return what is now certain."""
        self._source.text += text
        return self._run()

    def finish(self, *, cut: bool) -> list[Event]:
        """Return what was held back. `cut`: the model was stopped before it had finished."""
        self._source.ended, self._source.cut = True, cut
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            match [*events[-1:], event]:
                case [Text(before), Text(text)]:
                    events[-1] = Text(before + text)
                case [Arguments(before), Arguments(text)]:
                    events[-1] = Arguments(before + text)
                case _ if event[0]:
                    events.append(event)
        return events


def _read(source: Source, form: CallFormat, schemas: Schemas) -> Reading[None]:
    """Separate text and calls. White space around a call belongs to it."""
    called = False
    while True:
        where, opening = source.seek(form.openings)
        said = len(source.text[:where].rstrip())
        if said:
            yield Text(source.take(said))
            called = False
        if opening:
            source.at = where - said
            try:
                yield from form.read(source, schemas)
                called = True
                if source.cut and UNFINISHED.match(source.text):
                    source.take(len(source.text))
            except MalformedCall:
                yield Text(source.take(where - said + len(opening)))
                called = False
        elif source.ended:
            if source.text.strip() or (source.text and not called):
                yield Text(source.take(len(source.text)))
            return
        else:
            yield None


def stream_value(source: Source, closing: str) -> Reading[None]:
    """Send the JSON of a call's arguments as it comes."""
    for piece in source.value(closing):
        yield None if piece is None else Arguments(piece)
        if piece is not None:
            source.settle()


def close(source: Source, *closings: str) -> Reading[None]:
    """Pass what ends a call, as much as there is of it; what else follows is left as it stands."""
    for closing in closings:
        yield from source.space()
        if (yield from source.match(closing)):
            source.settle()
        source.at = 0
