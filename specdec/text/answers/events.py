"""Events of a parsed answer, in output order."""

from typing import NamedTuple


class ThinkingDelta(NamedTuple):
    """The next part of the thinking."""

    text: str


class TextDelta(NamedTuple):
    """The next part of the answer's text."""

    text: str


class CallStart(NamedTuple):
    """A call begins."""

    name: str


class ArgumentsDelta(NamedTuple):
    """The next part of the call's arguments; the parts concatenate to JSON."""

    text: str


Event = ThinkingDelta | TextDelta | CallStart | ArgumentsDelta
