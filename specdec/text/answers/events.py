"""Events of a parsed answer, in output order."""

from typing import NamedTuple


class Thinking(NamedTuple):
    """The next part of the thinking."""

    text: str


class Text(NamedTuple):
    """The next part of the answer's text."""

    text: str


class Begin(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """The next part of the call's arguments; the parts concatenate to JSON."""

    text: str


Event = Thinking | Text | Begin | Arguments
