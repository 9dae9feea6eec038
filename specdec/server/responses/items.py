"""Items of a conversation in the Responses API, converted to a chat."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from specdec.server.failures import Failure
from specdec.server.messages import EITHER, ChatMessage, Many, TextOnly, unread
from specdec.server.tools.bodies import ToolCall

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


class ItemPart(TextOnly):
    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[Annotated[str, Tag("str")] | Annotated[Many[ItemPart], Tag("list")], EITHER]


class MessageItem(TextOnly):
    """A message; also the default type."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(BaseModel):
    type: Literal["reasoning"]
    summary: Many[ItemPart] = []
    content: Many[ItemPart] | None = None


class FunctionCallItem(BaseModel):
    """A function call; `namespace` is its group of tools."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = Field(description="JSON")


class CustomCallItem(BaseModel):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutputItem(BaseModel):
    """Result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Content


def _type(item: Any) -> str:
    """Return an item's tag. It differs from all field names, which keeps it out of error locations."""
    kind = (item.get("type") or "message") if isinstance(item, dict) else getattr(item, "type", None)
    return "output item" if kind in ("function_call_output", "custom_tool_call_output") else f"{kind} item"


Item = Annotated[
    Annotated[MessageItem, Tag("message item")]
    | Annotated[ReasoningItem, Tag("reasoning item")]
    | Annotated[FunctionCallItem, Tag("function_call item")]
    | Annotated[CustomCallItem, Tag("custom_tool_call item")]
    | Annotated[CallOutputItem, Tag("output item")],
    Discriminator(
        _type,
        custom_error_type="item",
        custom_error_message="send items of type message, reasoning, function_call, function_call_output, "
        "custom_tool_call or custom_tool_call_output; images and files are not supported",
    ),
]


def flat_name(name: str, namespace: str | None) -> str:
    """Return the model's name of a tool in a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


@dataclass(slots=True)
class AssistantTurn:
    """An assistant's output in one turn, in the template's format."""

    reasoning: str = ""
    text: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> ChatMessage:
        fields: dict[str, Any] = {"role": "assistant", "content": self.text or ""}
        fields |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return ChatMessage(**fields, **({"tool_calls": self.calls} if self.calls else {}))


def as_messages(instructions: str | None, items: Iterable[Item], *, first: int = 0) -> list[ChatMessage]:
    """Convert items to a chat; an assistant's consecutive reasoning, texts and calls are one message.

    Error indices count from `first`: stored items, which precede the request's own, are negative.

    System and developer messages before the first turn become one system message, since many templates only
    accept one, at the start; later ones become user messages.
    """
    system = [instructions] if instructions else []
    messages: list[ChatMessage] = []
    turn: AssistantTurn | None = None
    calls: set[str] = set()
    for index, item in enumerate(items, first):
        if isinstance(item, CallOutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            messages += [turn.message] if turn else []
            turn = None
        match item:
            case MessageItem(role="assistant"):
                if turn and turn.text is not None and not turn.calls:
                    messages.append(turn.message)
                    turn = None
                turn = turn or AssistantTurn()
                turn.text = (turn.text or "") + _text(item.content, index)
            case MessageItem(role="system" | "developer") if not messages:
                system.append(_text(item.content, index))
            case MessageItem():
                messages.append(ChatMessage(role="user", content=_text(item.content, index)))
            case CallOutputItem():
                text = _text(item.output, index)
                if item.call_id not in calls:
                    raise _uncalled(item.call_id, index)
                messages.append(
                    ChatMessage(**{"role": "tool", "tool_call_id": item.call_id, "content": text})
                )
            case ReasoningItem():
                if turn and (turn.text is not None or turn.calls):
                    messages.append(turn.message)
                    turn = None
                turn = turn or AssistantTurn()
                turn.reasoning += _text(item.content or item.summary, index)
            case FunctionCallItem() | CustomCallItem():
                turn = turn or AssistantTurn()
                turn.calls.append(_called(item))
                calls.add(item.call_id)
    messages += [turn.message] if turn else []
    return [*([ChatMessage(role="system", content="\n\n".join(system))] if system else []), *messages]


def _uncalled(call_id: str, index: int) -> Failure:
    return Failure(
        400,
        f"input.{index}.call_id: no call before it has the id {call_id!r:.80}; send the call too, or "
        "previous_response_id.",
        param="input",
    )


def _called(item: FunctionCallItem | CustomCallItem) -> ToolCall:
    arguments = item.arguments if isinstance(item, FunctionCallItem) else json.dumps({"input": item.input})
    function = {"name": flat_name(item.name, item.namespace), "arguments": arguments}
    return ToolCall(**{"id": item.call_id, "type": "function", "function": function})


def _text(content: str | list[ItemPart], index: int) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXTS or part.text is part.refusal is None:
            raise Failure(
                400, f"input.{index}: {unread(part.type, lacks=part.type in TEXTS)}.", param="input"
            )
    return "".join(part.text or part.refusal or "" for part in content)
