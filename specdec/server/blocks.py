"""Answers as a sequence of blocks, as in the Responses and Messages APIs."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from specdec.core.outputs import Delta
from specdec.server.events import AnswerEvents, ExpectedContent
from specdec.text.answers.events import CallStart, Event, TextDelta, ThinkingDelta

Json = dict[str, Any]
Kind = Literal["thinking", "text", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """Thinking, text, or a call with its arguments."""

    kind: Kind
    index: int
    key: str
    """Base of its ids."""
    name: str = ""
    """Name of the called function."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockWriter(ABC):
    """Turn one answer into block events: each block is opened, extended, and closed before the next."""

    def __init__(self, expected: ExpectedContent) -> None:
        self._events = AnswerEvents(expected)
        self._open: AnswerBlock | None = None
        self._count = 0
        self.delta: Delta | None = None
        """The last delta, or None before it."""

    def push(self, delta: Delta) -> list[Json]:
        """Return the events for a delta."""
        events = [item for event in self._events.push(delta) for item in self._take(event)]
        if delta.finish_reason:
            self.delta = delta
            events += self._close(is_cut=delta.finish_reason != "stop")
        return events

    @property
    def has_called(self) -> bool:
        """Return whether the answer ended with calls, and was not cut off."""
        return self.delta is not None and self._events.finish_reason(self.delta.finish_reason) == "tool_calls"

    def _take(self, event: Event) -> list[Json]:
        match event:
            case CallStart(name):
                return [*self._close(), *self._begin("call", name)]
            case ThinkingDelta():
                opening = self._in("thinking")
            case TextDelta():
                opening = self._in("text")
            case _:
                opening = []  # arguments belong to the current call
        assert self._open
        self._open.pieces.append(event.text)
        return [*opening, *self.added(self._open, event.text)]

    def _in(self, kind: Kind) -> list[Json]:
        if self._open and self._open.kind == kind:
            return []
        return [*self._close(), *self._begin(kind)]

    def _begin(self, kind: Kind, name: str = "") -> list[Json]:
        self._open = AnswerBlock(kind, self._count, uuid4().hex[:24], name)
        self._count += 1
        return self.opened(self._open)

    def _close(self, *, is_cut: bool = False) -> list[Json]:
        block, self._open = self._open, None
        return self.closed(block, is_cut=is_cut) if block else []

    @abstractmethod
    def opened(self, block: AnswerBlock) -> list[Json]:
        """Return the events that open a block."""

    @abstractmethod
    def added(self, block: AnswerBlock, text: str) -> list[Json]:
        """Return the events that append text to it."""

    @abstractmethod
    def closed(self, block: AnswerBlock, *, is_cut: bool) -> list[Json]:
        """Return the events that close it, complete or cut off."""
