"""Bodies of the Responses API."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Tag
from pydantic_core import PydanticKnownError

from specdec.config.sampling import MOST_TOKENS
from specdec.server.bodies import BUDGETS, SCHEMA, ChatBody, NamedSchema, ResponseFormat
from specdec.server.dialects import Dialect
from specdec.server.failures import Failure
from specdec.server.messages import EITHER, CacheBreakpoint, Many
from specdec.server.responses.items import Item, MessageItem, as_messages
from specdec.server.responses.tools import AnyTool, ChosenTool, Toolbox

LONGEST_ID = 128
LOGPROBS = "message.output_text.logprobs"
REPEATED = {"instructions", "reasoning", "text", "tool_choice", "tools"}
"""Fields that each response repeats, three times in a stream; `metadata` is short."""
MOST_REPEATED = 1 << 20
"""Maximum bytes of these fields as JSON. A stream that repeated 15 MB stopped all others for 2 s."""
MOST_METADATA = 16
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _few(metadata: Any) -> Any:
    """Limit the number of fields before validating them: all errors would be collected."""
    if isinstance(metadata, dict) and len(metadata) > MOST_METADATA:
        size = {"field_type": "Dictionary", "max_length": MOST_METADATA, "actual_length": len(metadata)}
        raise PydanticKnownError("too_long", size)
    return metadata


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def response_format(self) -> ResponseFormat:
        """Return it in the chat API's format."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        if self.schema_ is None:
            raise Failure(400, "text.format.schema: it is required.", param="text.format")
        return ResponseFormat(type=self.type, json_schema=NamedSchema(name=self.name, schema=self.schema_))


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = Field(
        None, description="return the whole thinking as the item's summary; without it, as its content"
    )

    @property
    def as_summary(self) -> bool:
        return self.summary not in (None, "none")


class ResponseBody(Dialect):
    REFUSED = {  # noqa: RUF012
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
        "top_logprobs": (0,),
    }
    HARMLESS = frozenset(
        {
            *("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "client_metadata", "stream_options", "max_tool_calls"),
            *("access_programs", "truncation"),
        }
    )
    NAMES = {  # noqa: RUF012
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "structured_outputs": "text.format",
        "response_format": "text.format",
        SCHEMA: "text.format.schema",
        "reasoning_effort": "reasoning.effort",
    }

    input: Annotated[Annotated[str, Tag("str")] | Annotated[Many[Item], Tag("list")], EITHER] = Field(
        description="a string, or items"
    )
    instructions: str | None = Field(None, description="the system message, for this request only")
    previous_response_id: str | None = Field(
        None, max_length=LONGEST_ID, description="continue a stored response"
    )
    store: bool = Field(True, description="store the response, for previous_response_id and GET")
    metadata: Annotated[dict[MetadataKey, MetadataValue], BeforeValidator(_few)] | None = Field(
        None, max_length=MOST_METADATA
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="maximum tokens, thinking included"
    )
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = Field(None, ge=0, description="maximum tokens of thinking")
    thinking_budget: int | None = Field(None, ge=0, description="the same, as Qwen names it")
    max_thinking_tokens: int | None = Field(None, ge=0, description="the same once more")
    tools: Many[AnyTool] | None = Field(None, description="functions, custom tools, and namespaces of them")
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool = Field(True, description="allow several calls in an answer")
    include: Many[str] | None = Field(None, description="no effect; log-probabilities are refused")

    @property
    def items(self) -> list[Item]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @classmethod
    def read(cls, data: bytes) -> Self:
        body = super().read(data)
        if LOGPROBS in (body.include or ()):
            raise Failure(400, f"include: {LOGPROBS} is not supported here; leave it out.", param="include")
        sizes = {name: len(json.dumps(value)) for name, value in body.repeated.items()}
        if (size := sum(sizes.values())) > MOST_REPEATED:
            longest = max(sizes, key=sizes.__getitem__)
            raise Failure(
                400,
                f"{longest}: responses repeat {', '.join(sorted(sizes))}, which have {size:,} bytes of JSON "
                f"and may have {MOST_REPEATED:,}; shorten {longest}.",
                param=longest,
            )
        return body

    @cached_property
    def repeated(self) -> dict[str, Any]:
        """Return request fields repeated by the response, as given."""
        return self.model_dump(exclude_unset=True, mode="json", by_alias=True, include=REPEATED)

    def chat(self, history: Sequence[Item], toolbox: Toolbox) -> ChatBody:
        """Return the equivalent chat, after the stored conversation."""
        fields: dict[str, Any] = {"max_tokens": self.max_output_tokens}
        fields |= {name: getattr(self, name) for name in BUDGETS}
        if self.text and self.text.format:
            fields["response_format"] = self.text.format.response_format
        if toolbox.tools:
            fields["tools"] = toolbox.tools
        fields["tool_choice"] = toolbox.choice(self.tool_choice)
        fields["parallel_tool_calls"] = self.parallel_tool_calls
        if self.reasoning:
            fields["reasoning_effort"] = self.reasoning.effort
        messages = as_messages(self.instructions, [*history, *self.items], first=-len(history))
        if messages:  # the conversation's next request starts with all of this one
            messages[-1].cache_control = CacheBreakpoint(type="ephemeral")
        return self.as_chat(messages, **fields)
