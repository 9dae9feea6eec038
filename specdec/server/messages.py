"""A chat's messages, and cache marks for shared prefixes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specdec.server.failures import Failure
from specdec.server.tools.bodies import ToolCall

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""Only the first mistake is reported: collecting millions would block the server."""
CACHE = "cache_control"
MOST_MARKS = 4
MEDIA = frozenset(
    {
        *("audio", "image", "image_url", "images", "input_audio", "input_image", "video", "video_url"),
        *("videos", "file_id", "file_url", "file_data"),
    }
)
"""Fields of media content."""
THOUGHT = ("reasoning_content", "reasoning")
"""Field names of an assistant's thinking; templates use the first."""


class CacheBreakpoint(BaseModel):
    """Anthropic's cache mark: other chats will share the prefix up to here."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(
        None, description="has no effect: prefixes are evicted when memory is needed"
    )


def _whole_mark(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Report any error in a mark as one error, since it has a single valid form."""
    try:
        return read(value)
    except ValidationError:
        raise PydanticCustomError("mark", 'give {"type": "ephemeral"}, or leave it out') from None


def _kind(content: Any) -> str | None:
    return next((kind.__name__ for kind in (str, list) if isinstance(content, kind)), None)


EITHER = Discriminator(
    _kind, custom_error_type="either", custom_error_message="give a string, or a list of parts"
)
"""A string or a list: errors refer to the given type, with the location inside it."""


class TextOnly(BaseModel):
    """Base of objects without media fields, which are refused by name.

    Lists are validated in Rust, which only lets other threads run when it calls Python, as here.
    """

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        if isinstance(value, dict) and (
            media := sorted(name for name in MEDIA & value.keys() if value[name])
        ):
            message = "{name} is not supported: this engine takes text only; leave it out"
            raise PydanticCustomError("media", message, {"name": media[0]})
        return value


CacheControl = Annotated[CacheBreakpoint, WrapValidator(_whole_mark)]


class MessagePart(TextOnly):
    model_config = ConfigDict(extra="allow")

    type: str = "text"
    text: str | None = None
    cache_control: CacheControl | None = None


Content = Annotated[Annotated[str, Tag("str")] | Annotated[Many[MessagePart], Tag("list")], EITHER]


class ChatMessage(TextOnly):
    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, user, assistant, tool, or another role of the template")
    content: Content | None = Field(None, description="a string, or parts of type text")
    tool_calls: Many[ToolCall] | None = Field(None, description="calls of the assistant")
    reasoning_content: str | None = Field(None, description="thinking of the assistant")
    reasoning: str | None = Field(None, description="the same, under another name")
    cache_control: CacheControl | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """Return it in the template's format, with parts joined; `index` is its position."""
        calls = {"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {}
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        fields = self.model_dump(exclude_none=True, exclude={"content", "tool_calls", CACHE, *THOUGHT})
        fields |= {THOUGHT[0]: reasoning} if reasoning else {}
        return {**fields, "content": _text(self.content, index), **calls}

    @property
    def marks(self) -> list[int]:
        """Return the numbers of parts before each cache mark."""
        parts = self.content if isinstance(self.content, list) else [MessagePart()]
        indices = [i + 1 for i, part in enumerate(parts) if part.cache_control]
        return [*indices, len(parts)] if self.cache_control else indices

    def until(self, mark: int) -> str:
        """Return its text up to a mark."""
        return _text(self.content[:mark] if isinstance(self.content, list) else self.content, 0)


def unread(kind: str, *, lacks: bool) -> str:
    """Return why a part is refused: unknown type, or missing text."""
    return f"a part of type {kind!r:.40} " + (
        "lacks its text; give it" if lacks else "is not supported; send text only"
    )


def as_read(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the chat template's format."""
    return [message.plain(i) for i, message in enumerate(messages)]


def beginnings(messages: Sequence[ChatMessage]) -> list[list[dict[str, Any]]]:
    """Return the chat prefix before each mark, in the template's format."""
    marks = [(i, mark) for i, message in enumerate(messages) for mark in message.marks]
    if len(marks) > MOST_MARKS:
        raise Failure(
            400, f"{CACHE}: {len(marks)} marks are more than {MOST_MARKS}; leave some out.", param=CACHE
        )
    plain = as_read(messages) if marks else []
    return [[*plain[:i], {**plain[i], "content": messages[i].until(mark)}] for i, mark in marks]


def _text(content: str | list[MessagePart] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise Failure(
                400,
                f"messages.{index}.content: {unread(part.type, lacks=part.type == 'text')}.",
                param="messages",
            )
    return "".join(part.text or "" for part in content)
