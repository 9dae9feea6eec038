"""What each choice of a chat thinks, says and calls: the same events for every API that writes them."""

from dataclasses import dataclass

from specdec.core.outputs import Delta
from specdec.server.tools.offer import Offer
from specdec.text.answers.events import Begin, Event, Text, Thinking
from specdec.text.answers.reader import AnswerReader
from specdec.text.answers.thinking import ThinkingFormat


@dataclass(frozen=True, slots=True)
class Expected:
    """What the answers of one chat may hold beside text."""

    thinking: ThinkingFormat | None = None
    offer: Offer | None = None
    shows_thinking: bool = True


class AnswerEvents:
    """The events of one choice. Where one call is allowed, those after the first are left out.

    An answer that must be calls has no text: what is none in it is the beginning of a tag that was cut off.
    """

    def __init__(self, expected: Expected) -> None:
        offer = expected.offer
        self._reader = AnswerReader(expected.thinking, offer.calls if offer else None)
        self._most_calls = None if offer is None or offer.parallel else 1
        self._shows_thinking = expected.shows_thinking
        self._speaks = offer is None or offer.structure is None
        self._calls = 0
        self.has_thought = False
        """Whether anything was thought, shown or not."""

    def push(self, delta: Delta) -> list[Event]:
        """Return what a piece of the answer adds, in order; the last piece brings what was held back."""
        events = self._reader.push(delta.text)
        if delta.finish_reason:
            events += self._reader.finish(cut=delta.finish_reason != "stop")
        return [event for event in events if self._shows(event)]

    def finish_reason(self, why: str | None) -> str | None:
        """Return why it ended, in OpenAI's words: tool_calls if it holds any and was not cut off."""
        return "tool_calls" if why == "stop" and self._calls else why

    def _shows(self, event: Event) -> bool:
        self._calls += isinstance(event, Begin)
        if isinstance(event, Text):
            return self._speaks
        if isinstance(event, Thinking):
            self.has_thought = True
            return self._shows_thinking
        return self._most_calls is None or self._calls <= self._most_calls
