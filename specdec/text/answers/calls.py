"""Tool calls within an answer, in the model's own format."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.text.answers.events import Arguments, Text
from specdec.text.answers.source import MalformedCall, Reading, Source

UNFINISHED = re.compile(r"\s*[<\[][^<>\[\]\s]*\Z")
"""A tag that was cut off. Within a call it is no text."""
MOST_REREAD = 1 << 18
"""Characters of an answer that may turn out to be no calls; beyond, all is text, so that reading ends."""
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
    leads: bool
    """Calls stand at the answer's beginning alone: what looks like one behind text is text."""
    before: str
    between: str
    behind: str
    """What stands before, between and behind calls that are forced."""

    def read(self, source: Source, schemas: Schemas) -> Reading[None]:
        """Read a call from its opening to its end. What comes before its `Begin` may still be no call."""
        ...

    def frame(self, name: str) -> tuple[str, str]:
        """Return what stands before and behind the arguments of a call, for one that is forced."""
        ...


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may hold."""

    form: CallFormat
    schemas: Schemas


def read_calls(source: Source, calls: Calls) -> Reading[None]:
    """Separate text and calls. White space around a call belongs to it."""
    called = False
    while True:
        where, opening = source.seek(calls.form.openings)
        said = len(source.text[:where].rstrip())
        if said:
            yield Text(source.take(said))
            if calls.form.leads:
                yield from read_text(source)
                return
            called = False
        if opening:
            source.at = where - said
            try:
                yield from calls.form.read(source, calls.schemas)
                called = True
                if source.cut and UNFINISHED.match(source.text):
                    source.take(len(source.text))
            except MalformedCall:
                source.reread += source.at
                yield Text(source.take(where - said + len(opening)))
                called = False
                if source.reread > MOST_REREAD:
                    yield from read_text(source)
                    return
        elif source.ended:
            if source.text.strip() or (source.text and not called):
                yield Text(source.take(len(source.text)))
            return
        else:
            yield None


def read_text(source: Source) -> Reading[None]:
    """Take all that comes for text."""
    while True:
        if source.text:
            yield Text(source.take(len(source.text)))
        if source.ended:
            return
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
