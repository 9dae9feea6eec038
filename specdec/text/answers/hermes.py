"""Calls as JSON between tags: Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4."""

from collections.abc import Sequence

from specdec.text.answers.calls import CallFormat, Schemas, close
from specdec.text.answers.json_calls import json_frame, read_object
from specdec.text.answers.source import Reading, TextCursor

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(CallFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; arguments are streamed."""

    openings: Sequence[str] = (OPENING,)
    sign = OPENING
    between = "\n"

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(OPENING)
        yield from source.space()
        yield from read_object(source, CLOSING)
        yield from close(source, CLOSING)

    def frame(self, name: str) -> tuple[str, str]:
        before, behind = json_frame(name, "arguments")
        return f"{OPENING}\n{before}", f"{behind}\n{CLOSING}"
