"""Responses of the Messages API, whole or as typed events."""

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from specdec.core.outputs import Delta
from specdec.server.anthropic.errors import error_body
from specdec.server.blocks import AnswerBlock, BlockWriter
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure
from specdec.server.formats import Usage

Json = dict[str, Any]
SIGNATURE = "specdec"
"""Signature of thinking: clients return it, and some drop thinking without one. It signs nothing."""
REASONS = {"stop": "end_turn", "length": "max_tokens"}
BROKEN = "INVALID_JSON"
"""Field that holds arguments which are not a JSON object, as a call's input must be."""


class MessageWriter(BlockWriter):
    is_typed = True

    def __init__(self, expected: ExpectedContent, usage: Usage, model: str) -> None:
        super().__init__(expected)
        self.usage = usage
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._content: list[Json] = []
        self._begun = False

    def whole(self, said: Mapping[int, Delta]) -> Iterator[str]:
        self.push(said[0])
        yield json.dumps(
            {**self._head, "content": self._content, **self._finish_reason(), "usage": self._usage()}
        )

    def events(self, choice: int, delta: Delta) -> list[Json]:
        return [*self._begin_stream(), *self.push(delta)]

    def end(self) -> list[Json]:
        delta = {"type": "message_delta", "delta": self._finish_reason(), "usage": self._usage()}
        return [delta, {"type": "message_stop"}]

    def failed(self, failure: Failure) -> list[Json]:
        return [error_body(failure)]

    def opened(self, block: AnswerBlock) -> list[Json]:
        empty = _content(block) | ({"input": {}} if block.kind == "call" else {})
        empty |= {"signature": ""} if block.kind == "thinking" else {}
        return [{"type": "content_block_start", "index": block.index, "content_block": empty}]

    def added(self, block: AnswerBlock, text: str) -> list[Json]:
        kind, name = {
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }[block.kind]
        return [_delta(block, {"type": kind, name: text})]

    def closed(self, block: AnswerBlock, *, is_cut: bool) -> list[Json]:
        self._content.append(_content(block))
        signature = [_delta(block, {"type": "signature_delta", "signature": SIGNATURE})]
        stop = {"type": "content_block_stop", "index": block.index}
        return [*(signature if block.kind == "thinking" else []), stop]

    def _begin_stream(self) -> list[Json]:
        if self._begun:
            return []
        self._begun = True
        fields: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [{"type": "message_start", "message": self._head | fields}, {"type": "ping"}]

    def _finish_reason(self) -> Json:
        """Return the stop reason."""
        assert self.delta and self.delta.finish_reason
        if self.has_called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(sequence := self.delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        return {"stop_reason": REASONS[self.delta.finish_reason], "stop_sequence": None}

    def _usage(self) -> Json:
        usage = self.usage.as_json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
        }


def _delta(block: AnswerBlock, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _content(block: AnswerBlock) -> Json:
    """Return a block's content as in a whole response."""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {BROKEN: arguments}
