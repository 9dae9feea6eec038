"""Responses of the Responses API, whole or as typed events."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec.core.outputs import Delta
from specdec.server.blocks import AnswerBlock, BlockWriter
from specdec.server.events import ExpectedContent
from specdec.server.failures import Failure
from specdec.server.formats import Usage
from specdec.server.responses.bodies import ResponseBody
from specdec.server.responses.tools import Toolbox

Json = dict[str, Any]
Keep = Callable[[Json], None]


class ResponseWriter(BlockWriter):
    """Writes one response; `keep` stores it when complete, before its last event is sent."""

    is_typed = True

    def __init__(
        self,
        expected: ExpectedContent,
        usage: Usage,
        body: ResponseBody,
        toolbox: Toolbox,
        model: str,
        keep: Keep,
    ) -> None:
        super().__init__(expected)
        self.usage, self._toolbox, self._keep = usage, toolbox, keep
        self._as_summary = bool(body.reasoning and body.reasoning.as_summary)
        self._head = _head(body, model)
        self._output: list[Json] = []
        self._number = 0

    def whole(self, said: Mapping[int, Delta]) -> Iterator[str]:
        self.push(said[0])
        yield json.dumps(self._end())

    def events(self, choice: int, delta: Delta) -> list[Json]:
        return [*([] if self._number else self._begin_stream()), *self.push(delta)]

    def end(self) -> list[Json]:
        response = self._end()
        return [self._event(f"response.{response['status']}", response=response)]

    def failed(self, failure: Failure) -> list[Json]:
        message = str(failure)
        error = {"code": CODES.get(failure.status, "server_error"), "message": message}
        event = self._event("error", code=failure.code, message=message, param=failure.param)
        return [event, self._event("response.failed", response=self._response("failed", error=error))]

    def opened(self, block: AnswerBlock) -> list[Json]:
        item = self._item(block, "in_progress")
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        return events if block.kind == "call" else [*events, self._of_part(block, "added", "")]

    def added(self, block: AnswerBlock, text: str) -> list[Json]:
        if block.kind == "call" and self._toolbox.called(block.name).is_custom:
            return []  # its text is known once its JSON is complete
        return [self._of_text(block, "delta", delta=text)]

    def closed(self, block: AnswerBlock, *, is_cut: bool) -> list[Json]:
        item = self._item(block, "incomplete" if is_cut else "completed", block.text)
        self._output.append(item)
        events: list[Json] = []
        if item["type"] == "custom_tool_call":
            events = [self._of_text(block, "delta", delta=item["input"])]
            events.append(self._of_text(block, "done", input=item["input"]))
        elif block.kind == "call":
            events = [self._of_text(block, "done", name=item["name"], arguments=block.text)]
        else:
            events = [self._of_text(block, "done", text=block.text)]
            events.append(self._of_part(block, "done", block.text))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _item(self, block: AnswerBlock, status: str, text: str = "") -> Json:
        fields: Json = {"id": self._id(block), "status": status}
        if block.kind == "text":
            content = [self._part(block, text)] if status != "in_progress" else []
            return fields | {"type": "message", "role": "assistant", "content": content}
        if block.kind == "thinking":
            parts = [self._part(block, text)] if status != "in_progress" else []
            reasoning = {"summary": parts} if self._as_summary else {"summary": [], "content": parts}
            return fields | {"type": "reasoning", **reasoning, "encrypted_content": None}
        tool = self._toolbox.called(block.name)
        fields |= {"call_id": f"call_{block.key}", "name": tool.name}
        fields |= {"namespace": tool.namespace} if tool.namespace else {}
        if tool.is_custom:
            return fields | {"type": "custom_tool_call", "input": _input(text)}
        return fields | {"type": "function_call", "arguments": text}

    def _id(self, block: AnswerBlock) -> str:
        if block.kind == "call":
            return f"{'ctc' if self._toolbox.called(block.name).is_custom else 'fc'}_{block.key}"
        return f"{'rs' if block.kind == 'thinking' else 'msg'}_{block.key}"

    def _part(self, block: AnswerBlock, text: str) -> Json:
        if block.kind == "text":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": text}

    def _of_part(self, block: AnswerBlock, stage: str, text: str) -> Json:
        """Return the event of an item's part: one per item, none for a call."""
        is_summary = block.kind == "thinking" and self._as_summary
        name = "reasoning_summary_part" if is_summary else "content_part"
        return self._of(block, f"response.{name}.{stage}", part=self._part(block, text))

    def _of_text(self, block: AnswerBlock, stage: str, **fields: Any) -> Json:
        """Return the event of an item's text."""
        if block.kind == "call":
            is_custom = self._toolbox.called(block.name).is_custom
            name = "custom_tool_call_input" if is_custom else "function_call_arguments"
        elif block.kind == "text":
            name, fields = "output_text", fields | {"logprobs": []}
        else:
            name = "reasoning_summary_text" if self._as_summary else "reasoning_text"
        return self._of(block, f"response.{name}.{stage}", **fields)

    def _of(self, block: AnswerBlock, kind: str, **fields: Any) -> Json:
        index = {"summary_index" if "summary" in kind else "content_index": 0}
        location = {"item_id": self._id(block), "output_index": block.index}
        return self._event(kind, **location, **({} if block.kind == "call" else index), **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _begin_stream(self) -> list[Json]:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _end(self) -> Json:
        """Return the whole response, and store it."""
        assert self.delta and self.delta.finish_reason
        status, reason = ENDS[self.delta.finish_reason]
        fields: Json = {"incomplete_details": {"reason": reason}} if reason else {}
        fields |= {"usage": _usage(self.usage), "completed_at": None if reason else int(time.time())}
        response = self._response(status, **fields)
        self._keep(response)
        return response

    def _response(self, status: str, **fields: Any) -> Json:
        return {**self._head, "status": status, "output": list(self._output), **fields}


ENDS = {"stop": ("completed", None), "length": ("incomplete", "max_output_tokens")}
"""Status and incompleteness reason by finish reason."""
CODES = {400: "invalid_prompt", 404: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Error codes by status; all others are server errors."""


def _head(body: ResponseBody, model: str) -> Json:
    """Return the response fields known from the request."""
    fields = body.repeated
    effort, summary = (getattr(body.reasoning, name, None) for name in ("effort", "summary"))
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": summary},
        "store": body.store,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **(fields.get("text") or {})},
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(usage: Usage) -> Json:
    counts = usage.as_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": counts["completion_tokens_details"]["reasoning_tokens"]
        },
        "total_tokens": counts["total_tokens"],
    }


def _input(arguments: str) -> str:
    """Return a custom tool's input; arguments without a valid input are returned unchanged."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
