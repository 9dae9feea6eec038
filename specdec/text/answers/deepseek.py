"""DeepSeek's calls: names before JSON in V3, R1 and V3.1, elements with attributes in V3.2."""

from collections.abc import Sequence

from specdec.text.answers.calls import CallFormat, Schemas, close, stream_value
from specdec.text.answers.events import CallStart
from specdec.text.answers.json_calls import read_several
from specdec.text.answers.qwen3_coder import read_parameters
from specdec.text.answers.source import Reading, TextCursor, Waiting

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"
MARK = "｜DSML｜"
"""Prefix of V3.2's tags."""
BLOCK, BLOCK_END = f"<{MARK}function_calls>", f"</{MARK}function_calls>"
INVOKE, INVOKE_END = f"<{MARK}invoke", f"</{MARK}invoke>"
PARAMETER, PARAMETER_END = f"<{MARK}parameter", f"</{MARK}parameter>"
OTHERS = {"number", "boolean", "object", "array", "null"}


class DeepSeek(CallFormat):
    """`<｜tool▁calls▁begin｜>`, calls starting with `<｜tool▁call▁begin｜>`, `<｜tool▁calls▁end｜>`.

    A call is `NAME<｜tool▁sep｜>{…}`, or `function<｜tool▁sep｜>NAME` with its JSON in a fenced block.
    Both are parsed, whichever the model was trained on.
    """

    openings: Sequence[str] = (CALLS,)
    before, behind = CALLS, CALLS_END

    def __init__(self, *, sign: str, fenced: bool) -> None:
        self.sign, self._fenced = sign, fenced
        self.between = "\n" if fenced else ""

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(CALLS)
        yield from source.space()
        yield from read_several(source, lambda: _read_call(source), "")
        yield from close(source, CALLS_END)

    def frame(self, name: str) -> tuple[str, str]:
        if self._fenced:
            return f"{CALL}function{SEPARATOR}{name}\n{FENCE}\n", f"\n{FENCE_END}{CALL_END}"
        return f"{CALL}{name}{SEPARATOR}", CALL_END


class DeepSeekMarkup(CallFormat):
    """`<｜DSML｜invoke name="NAME">` with `<｜DSML｜parameter name="KEY" string="true">` elements.

    Strings are streamed; values with `string="false"` are sent as JSON once complete. A JSON object in place
    of the parameters is accepted too.
    """

    openings: Sequence[str] = (BLOCK,)
    sign = MARK
    style = "deepseek_xml"
    before, between, behind = f"{BLOCK}\n", "\n", f"\n{BLOCK_END}"

    def read(self, source: TextCursor, schemas: Schemas) -> Reading[None]:
        yield from source.need(BLOCK)
        yield from source.space()
        yield from read_several(source, lambda: _read_invoke(source), "")
        yield from close(source, BLOCK_END)

    def frame(self, name: str) -> tuple[str, str]:
        return f'{INVOKE} name="{name}">\n', f"\n{INVOKE_END}"


def _read_call(source: TextCursor) -> Reading[None]:
    yield from source.need(CALL)
    yield from source.space()
    name = yield from source.word()
    yield from source.need(SEPARATOR)
    yield from source.space()
    if not (yield from source.sees("{")):
        name = yield from source.word()
        yield from source.space()
        yield from source.match(FENCE)
        yield from source.space()
    yield from source.need("{")
    source.take(source.at - 1)
    yield CallStart(name)
    yield from stream_value(source, CALL_END)
    yield from close(source, FENCE_END, CALL_END)
    if source.cut and FENCE_END.startswith(source.text.strip()):
        source.take(len(source.text))  # the fence was cut off


def _read_invoke(source: TextCursor) -> Reading[None]:
    yield from source.need(INVOKE)
    name = yield from _attribute(source, "name")
    yield from source.need(">")
    yield from source.space()
    first = yield from source.need(PARAMETER, INVOKE_END, "{")
    source.take(source.at - len(first))
    yield CallStart(name)
    if first == "{":
        yield from stream_value(source, INVOKE_END)
    else:
        yield from read_parameters(source, PARAMETER, lambda: _head(source), (PARAMETER_END,))
    yield from close(source, INVOKE_END)


def _head(source: TextCursor) -> Waiting[tuple[str, set[str]]]:
    """Parse a parameter's name, and whether its value is a string."""
    key = yield from _attribute(source, "name")
    text = yield from _attribute(source, "string")
    yield from source.need(">")
    return key, {"string"} if text == "true" else OTHERS


def _attribute(source: TextCursor, name: str) -> Waiting[str]:
    yield from source.space()
    yield from source.need(f"{name}=")
    return (yield from source.string())
