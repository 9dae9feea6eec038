"""What an answer holds, in the order in which it was written."""

from typing import NamedTuple


class Thinking(NamedTuple):
    """The next part of what the model thought before it answered."""

    text: str


class Text(NamedTuple):
    """The next part of what it says."""

    text: str


class Begin(NamedTuple):
    """A call begins."""

    name: str


class Arguments(NamedTuple):
    """The next part of its arguments, which together are JSON."""

    text: str


Event = Thinking | Text | Begin | Arguments
