"""Parse a streamed answer into thinking, text and tool calls."""

from specdec.text.answers.calls import ToolCallReader, read_calls, read_text
from specdec.text.answers.events import ArgumentsDelta, Event, TextDelta, ThinkingDelta
from specdec.text.answers.source import Reading, TextCursor
from specdec.text.answers.thinking import ThinkingFormat, read_thinking


class AnswerReader:
    """Parse one answer. Sent parts of a call stay sent; a malformed call becomes text, unchanged.

    `thinking` is None if the answer does not think (see `ThinkingFormat.after`), `calls` is None if no tools
    are offered; with both None, everything is text. Calls within thinking are ignored.
    """

    def __init__(self, thinking: ThinkingFormat | None = None, calls: ToolCallReader | None = None) -> None:
        self._source = TextCursor()
        self._steps = _read(self._source, thinking, calls)

    def push(self, text: str) -> list[Event]:
        """Append a piece of text, and return the events that are now certain."""
        self._source.text += text
        return self._run()

    def finish(self, *, cut: bool) -> list[Event]:
        """Return the events held back. `cut`: the model was stopped before it had finished."""
        self._source.ended, self._source.cut = True, cut
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            match [*events[-1:], event]:
                case [ThinkingDelta(previous), ThinkingDelta(text)]:
                    events[-1] = ThinkingDelta(previous + text)
                case [TextDelta(previous), TextDelta(text)]:
                    events[-1] = TextDelta(previous + text)
                case [ArgumentsDelta(previous), ArgumentsDelta(text)]:
                    events[-1] = ArgumentsDelta(previous + text)
                case _ if event[0]:
                    events.append(event)
        return events


def _read(source: TextCursor, thinking: ThinkingFormat | None, calls: ToolCallReader | None) -> Reading[None]:
    if thinking:
        yield from read_thinking(source, thinking)
    yield from read_calls(source, calls) if calls else read_text(source)
