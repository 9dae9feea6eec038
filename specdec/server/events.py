"""Events of each choice of a chat (thinking, text, calls), shared by all APIs."""

from dataclasses import dataclass

from specdec.core.outputs import Delta
from specdec.server.tools.offer import ToolOffer
from specdec.text.answers.events import CallStart, Event, TextDelta, ThinkingDelta
from specdec.text.answers.reader import AnswerReader
from specdec.text.answers.thinking import ThinkingFormat


@dataclass(frozen=True, slots=True)
class ExpectedContent:
    """Optional content of a chat's answers: thinking and calls."""

    thinking: ThinkingFormat | None = None
    offer: ToolOffer | None = None
    shows_thinking: bool = True


class AnswerEvents:
    """The events of one choice. If one call is allowed, later ones are dropped.

    A forced call has no text: any text in it is the start of a tag that was cut off.
    """

    def __init__(self, expected: ExpectedContent) -> None:
        offer = expected.offer
        self._reader = AnswerReader(expected.thinking, offer.calls if offer else None)
        self._most_calls = None if offer is None or offer.parallel else 1
        self._shows_thinking = expected.shows_thinking
        self._speaks = offer is None or offer.structure is None
        self._calls = 0
        self.has_thought = False
        """Whether there was any thinking, shown or not."""

    def push(self, delta: Delta) -> list[Event]:
        """Return a delta's events, in order; the last delta includes held-back text."""
        events = self._reader.push(delta.text)
        if delta.finish_reason:
            events += self._reader.finish(cut=delta.finish_reason != "stop")
        return [event for event in events if self._shows(event)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason in OpenAI's terms: tool_calls if it has calls and was not cut off."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _shows(self, event: Event) -> bool:
        self._calls += isinstance(event, CallStart)
        if isinstance(event, TextDelta):
            return self._speaks
        if isinstance(event, ThinkingDelta):
            self.has_thought = True
            return self._shows_thinking
        return self._most_calls is None or self._calls <= self._most_calls
