"""Bodies of the Messages API, converted to chats."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from specdec.config.sampling import MOST_TOKENS
from specdec.server.bodies import SCHEMA, ChatBody, NamedSchema, ResponseFormat
from specdec.server.dialects import Dialect
from specdec.server.failures import Failure, Names, validation_failure
from specdec.server.messages import EITHER, CacheBreakpoint, ChatMessage, Many, MessagePart, TextOnly, unread
from specdec.server.tools.bodies import Function, NamedFunction, NamedTool, Tool, ToolCall
from specdec.server.tools.offer import Choice

BILLING = "x-anthropic-billing-header:"
"""Prefix of a block that Claude Code sends first in the system message, meant for Anthropic's servers. It
differs per request, so no two prompts would share a prefix: it is dropped."""
APART = "\n\n"
"""Separator between the texts of blocks."""


class CacheControl(BaseModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="has no effect")


class CacheableBlock(TextOnly):
    cache_control: CacheControl | None = None

    @property
    def mark(self) -> CacheBreakpoint | None:
        return CacheBreakpoint(type="ephemeral") if self.cache_control else None


class TextBlock(CacheableBlock):
    type: Literal["text"]
    text: str
    source: None = Field(None, description="images are not read")


class ThinkingBlock(BaseModel):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(BaseModel):
    """Encrypted thinking of another server; ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(CacheableBlock):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _type(block: Any) -> str | None:
    """Return a block's tag. It differs from all field names, which keeps it out of error locations."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"{kind} block" if isinstance(kind, str) else None


class AnyBlock(CacheableBlock):
    """A block of any type; only text is passed to the model."""

    type: str
    text: str | None = None


Texts = Annotated[Annotated[str, Tag("str")] | Annotated[Many[AnyBlock], Tag("list")], EITHER]


class ToolResultBlock(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""


Block = Annotated[
    Annotated[TextBlock, Tag("text block")]
    | Annotated[ThinkingBlock, Tag("thinking block")]
    | Annotated[RedactedBlock, Tag("redacted_thinking block")]
    | Annotated[ToolUseBlock, Tag("tool_use block")]
    | Annotated[ToolResultBlock, Tag("tool_result block")],
    Discriminator(
        _type,
        custom_error_type="block",
        custom_error_message="send blocks of type text, thinking, tool_use or tool_result: images and "
        "documents are not supported",
    ),
]


class AnthropicMessage(TextOnly):
    """A message of a client."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[str, Tag("str")] | Annotated[Many[Block], Tag("list")], EITHER]


class AnyTool(BaseModel):
    """A tool. Anthropic's built-in types have no schema and are ignored."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        return self.type in (None, "custom")


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @property
    def plain(self) -> Choice:
        """Return it in the chat API's format."""
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise Failure(400, "tool_choice.name: give the tool that must be called.", param="tool_choice")
        return NamedTool(type="function", function=NamedFunction(name=self.name))


class ThinkingConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(Dialect):
    """The fields that make up a prompt."""

    REFUSED = {"mcp_servers": ([],), "container": (), "fallbacks": ([],)}  # noqa: RUF012
    HARMLESS = frozenset(
        {
            *("metadata", "service_tier", "betas", "context_management", "diagnostics", "inference_geo"),
            *("speed", "user_profile_id"),
        }
    )
    NAMES = {  # noqa: RUF012
        "prompt": "messages",
        "stop": "stop_sequences",
        "structured_outputs": "output_config.format",
        "response_format": "output_config.format",
        SCHEMA: "output_config.format.schema",
        "reasoning_effort": "output_config.effort",
        "enable_thinking": "thinking",
        "thinking_token_budget": "thinking.budget_tokens",
    }

    messages: Many[AnthropicMessage] = Field(min_length=1)
    system: Texts | None = Field(None, description="the system message: a string, or blocks of type text")
    max_tokens: int | None = None
    stop_sequences: Many[str] | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = Field(None, description="effort, and a JSON schema as format")
    output_format: OutputFormat | None = Field(None, description="older name of output_config.format")
    tools: Many[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = Field(None, description="as cache_control on the last block")

    @property
    def names(self) -> Names:
        if not self.output_format or (self.output_config and self.output_config.format):
            return self.NAMES
        return {**self.NAMES, "response_format": "output_format", SCHEMA: "output_format.schema"}

    @property
    def ignored(self) -> list[str]:
        unsupported = [tool.type for tool in self.tools or () if tool.type and not tool.is_own]
        return [*dict.fromkeys(f"tools.{kind}" for kind in unsupported), *super().ignored]

    def chat(self) -> ChatBody:
        """Return the equivalent chat."""
        messages = [*_system(self.system), *_messages(self.messages)]
        if messages[-1].role == "assistant":
            raise Failure(
                400,
                "messages: continuing an assistant message is not supported; end with a user message.",
                param="messages",
            )
        if self.cache_control:
            messages[-1].cache_control = CacheBreakpoint(type="ephemeral")
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        config = self.output_config or OutputConfig()
        if output := config.format or self.output_format:
            schema = NamedSchema(schema=output.schema_)
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(self.tools or ()) if tool.is_own] or None
        if self.tool_choice:
            fields["tool_choice"] = self.tool_choice.plain
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        fields["reasoning_effort"] = config.effort
        if self.thinking:
            fields["enable_thinking"] = self.thinking.type != "disabled"
            fields["thinking_token_budget"] = self.thinking.budget_tokens
        return self.as_chat(messages, **fields)


class MessageBody(CountBody):
    max_tokens: int = Field(ge=1, le=MOST_TOKENS, description="maximum tokens, thinking included")


def _tool(tool: AnyTool, index: int) -> Tool:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    try:
        function = Function(**{name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        failure = validation_failure(error)
        raise Failure(400, f"tools.{index}.{failure}", param="tools") from None
    return Tool(type="function", function=function)


def _system(content: str | list[AnyBlock] | None) -> list[ChatMessage]:
    blocks = [AnyBlock(type="text", text=content)] if isinstance(content, str) else content or []
    kept = [block for block in blocks if not (block.text or "").startswith(BILLING)]
    return [ChatMessage(role="system", content=_parts(kept, "system"))] if kept else []


def _messages(turns: Sequence[AnthropicMessage]) -> Iterator[ChatMessage]:
    """Yield a chat's messages; each tool result becomes a message.

    System messages between turns become user messages, as many templates only accept one at the start.
    """
    calls: set[str] = set()
    for index, turn in enumerate(turns):
        content = turn.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        if turn.role == "assistant":
            calls |= {block.id for block in blocks if isinstance(block, ToolUseBlock)}
            yield _answer(blocks, index)
            continue
        texts: list[TextBlock] = []
        for block in blocks:
            if isinstance(block, TextBlock):
                texts.append(block)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield ChatMessage(role="user", content=_parts(texts, ""))
                    texts = []
                result = _result(block, index)
                if block.tool_use_id not in calls:
                    raise _uncalled(block.tool_use_id, index)
                yield result
            else:
                raise _misplaced(index, block.type, turn.role)
        if texts or not blocks:
            yield ChatMessage(role="user", content=_parts(texts, ""))


def _answer(blocks: Sequence[Block], index: int) -> ChatMessage:
    """Return an assistant's message."""
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    fields: dict[str, Any] = {"role": "assistant", "content": _parts(texts, "")}
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in blocks:
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append(ToolCall(**{"id": block.id, "type": "function", "function": function}))
                fields |= {"cache_control": block.mark} if block.mark else {}
            case ToolResultBlock():
                raise _misplaced(index, block.type, "assistant")
    fields |= {"reasoning_content": "".join(thoughts)} if thoughts else {}
    return ChatMessage(**fields, **({"tool_calls": calls} if calls else {}))


def _result(block: ToolResultBlock, index: int) -> ChatMessage:
    body = block.content
    content = body if isinstance(body, str) else _parts(body, f"messages.{index}.content")
    fields: dict[str, Any] = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    return ChatMessage(**fields, cache_control=block.mark)


def _parts(blocks: Sequence[TextBlock | AnyBlock], where: str) -> list[MessagePart]:
    """Return blocks as message parts with separators."""
    parts = []
    for i, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            raise Failure(
                400,
                f"{where}.{i}: {unread(block.type, lacks=block.type == 'text')}.",
                param=where.partition(".")[0],
            )
        text = block.text if i + 1 == len(blocks) else block.text + APART
        parts.append(MessagePart(type="text", text=text, cache_control=block.mark))
    return parts


def _uncalled(call_id: str, index: int) -> Failure:
    return Failure(
        400,
        f"messages.{index}.content: no tool_use block before it has the id {call_id!r:.80}; send that too.",
        param="messages",
    )


def _misplaced(index: int, kind: str, role: str) -> Failure:
    return Failure(
        400, f"messages.{index}.content: a block of type {kind} in a message of the {role}.", param="messages"
    )
