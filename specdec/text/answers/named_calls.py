"""Calls whose name precedes the JSON of their arguments: Mistral, Kimi K2."""

import re
from collections.abc import Sequence

from specdec.text.answers.calls import CallFormat, Schemas, close, stream_value
from specdec.text.answers.events import CallStart
from specdec.text.answers.json_calls import read_list, read_several
from specdec.text.answers.source import Reading, TextCursor

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Mistral(CallFormat):
    """`[TOOL_CALLS]NAME[ARGS]{…}`, repeated; the list of earlier models is parsed too."""

    openings: Sequence[str] = (CALLS,)
    sign = ARGS

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(CALLS)
        yield from source.space()
        if (yield from source.sees("[")):
            yield from read_list(source)
            return
        name = yield from source.word()
        if (yield from source.match(CALL_ID)):
            yield from source.word()
        yield from source.match(ARGS)
        yield from source.space()
        yield from source.need("{")
        source.take(source.at - 1)
        yield CallStart(name)
        yield from stream_value(source, "")

    def frame(self, name: str) -> tuple[str, str]:
        return f"{CALLS}{name}{ARGS}", ""


class Kimi(CallFormat):
    """`<|tool_calls_section_begin|>`, calls from `<|tool_call_begin|>` on, `<|tool_calls_section_end|>`.

    A call is named `functions.NAME:INDEX`.
    """

    openings: Sequence[str] = (SECTION,)
    sign = SECTION
    before, behind = SECTION, SECTION_END

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(SECTION)
        yield from source.space()
        yield from read_several(source, lambda: _read_kimi(source), "")
        yield from close(source, SECTION_END)

    def frame(self, name: str) -> tuple[str, str]:
        return f"{CALL}functions.{name}:0{ARGUMENT}", CALL_END


def _read_kimi(source: TextCursor) -> Reading[None]:
    yield from source.need(CALL)
    yield from source.space()
    call_id = yield from source.word()
    yield from source.space()
    yield from source.need(ARGUMENT)
    yield from source.space()
    yield from source.need("{")
    source.take(source.at - 1)
    name = KIMI_NAME.fullmatch(call_id)
    yield CallStart(name[1] if name else call_id)
    yield from stream_value(source, CALL_END)
    yield from close(source, CALL_END)
