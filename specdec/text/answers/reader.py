"""Read a streamed answer: what it thinks, what it says and what it calls."""

from specdec.text.answers.calls import Calls, read_calls, read_text
from specdec.text.answers.events import Arguments, Event, Text, Thinking
from specdec.text.answers.source import Reading, Source
from specdec.text.answers.thinking import ThinkingFormat, read_thinking


class AnswerReader:
    """Read one answer. What was sent of a call stays; what turns out to be none comes as text, unchanged.

    `thinking` is None where the answer does not think (see `ThinkingFormat.after`), and `calls` where nothing
    may be called; without either all of it is text. Calls within thinking are no calls.
    """

    def __init__(self, thinking: ThinkingFormat | None = None, calls: Calls | None = None) -> None:
        self._source = Source()
        self._steps = _read(self._source, thinking, calls)

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
                case [Thinking(before), Thinking(text)]:
                    events[-1] = Thinking(before + text)
                case [Text(before), Text(text)]:
                    events[-1] = Text(before + text)
                case [Arguments(before), Arguments(text)]:
                    events[-1] = Arguments(before + text)
                case _ if event[0]:
                    events.append(event)
        return events


def _read(source: Source, thinking: ThinkingFormat | None, calls: Calls | None) -> Reading[None]:
    if thinking:
        yield from read_thinking(source, thinking)
    yield from read_calls(source, calls) if calls else read_text(source)
