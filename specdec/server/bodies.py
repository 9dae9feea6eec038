"""What clients send, by the names of OpenAI's API and of vLLM's additions to it."""

import json
import logging
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.server.failures import Failure, misfit
from specdec.server.tools.bodies import Called, Tool
from specdec.server.tools.offer import Choice, Offer, make_offer
from specdec.server.tools.parser import CallFormat
from specdec.structure import Structure

logger = logging.getLogger(__name__)

Ids = list[StrictInt]
B = TypeVar("B", bound="Body")

HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority"),
    *(
        "parallel_tool_calls",
        "stream_usage",
        "best_of",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ),
    *("reasoning_effort", "verbosity", "include_stop_str_in_output", "request_id", "use_beam_search"),
}
"""Fields that clients send always, and that change nothing here at the values that `MEANS_NOTHING` lists."""
MEANS_NOTHING: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "logits_processors": ([],),
    "echo": (False,),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (0,),
    "web_search_options": ({},),
    "return_tokens_as_token_ids": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "add_special_tokens": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}
"""Fields that are known and not supported, with the values at which they ask for nothing."""
REFUSED = (
    *("suffix", "tools", "functions", "tool_choice", "function_call", "modalities", "audio", "prediction"),
    *("web_search_options", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("prompt_logprobs", "truncate_prompt_tokens"),
    *("echo", "regex", "ebnf", "json_schema", "stop_regex", "guided_decoding", "return_tokens_as_token_ids"),
    *("allowed_token_ids", "bad_words", "add_special_tokens", "continue_final_message", "documents"),
    *(
        "chat_template",
        "best_of",
        "use_beam_search",
        "logits_processors",
        "skip_special_tokens",
        "include_stop_str_in_output",
    ),
)


GUIDED = 'give structured_outputs: {"json": …}, {"regex": …}, {"choice": …} or {"grammar": …}'
INSTEAD = dict.fromkeys(
    (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding"),
        *("regex", "ebnf", "json_schema"),
    ),
    GUIDED,
)
"""What to do where there is more to do than to leave a field out."""


class Structured(BaseModel):
    """vLLM's names for the forms that an output may have."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="in EBNF; its first rule is root")
    structural_tag: dict[str, Any] | str | None = Field(None, description="as xgrammar describes them")

    @property
    def structure(self) -> Structure:
        given = self.model_dump(exclude_none=True)
        return Structure(
            **{"json_schema" if name == "json_" else name: value for name, value in given.items()}
        )


class NamedSchema(BaseModel):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def structure(self) -> Structure | None:
        if self.type == "json_schema":
            if self.json_schema is None:
                raise Failure(400, "response_format: it lacks json_schema.", param="response_format")
            return Structure(json_schema=self.json_schema.schema_)
        return Structure(json_object=True) if self.type == "json_object" else None


class StreamOptions(BaseModel):
    include_usage: bool = Field(False, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool = Field(False, description="put the usage so far into every chunk")


class Body(BaseModel):
    """What completions and chats share. Null counts as not given; bounds are those of `SamplingParams`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="the served model's name, as /v1/models lists it")
    max_tokens: int | None = Field(None, description="tokens to write at most")
    temperature: float | None = Field(None, description="0 always takes the likeliest token; default 1")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = Field(None, description="texts that end the output before them")
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, description="tokens before any that may end the output")
    response_format: ResponseFormat | None = Field(None, description="the form of the output")
    structured_outputs: Structured | None = Field(None, description="the form of the output, in vLLM's words")
    seed: int | None = Field(None, description="the same seed gives the same text, with drafts and without")
    logit_bias: dict[int, float] | None = None
    n: int | None = Field(None, description="choices for each prompt")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="put token ids beside the text")
    return_origins: bool = Field(
        False,
        description="put [text, origin] pieces beside the text: 0 is the target's, n a draft's at depth n",
    )
    return_metrics: bool = Field(False, description="say at the end what speculation earned")
    speculate: bool | None = Field(
        None, description="false: no drafts for this request; the text is the same"
    )
    return_drafts: bool = Field(
        False,
        description="put each verify step's draft beside the text: token_ids, texts and parents of its nodes "
        "(-1: the token chosen last), the accepted nodes, and the target's own token after them",
    )

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Read a body, and refuse what it asks for that nobody would do."""
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            raise Failure(400, "the body is no JSON; send one object, as UTF-8.") from None
        if not isinstance(given, dict):
            raise Failure(400, "the body is no JSON object; send one with the fields of the request.")
        fields = {name: value for name, value in given.items() if value is not None}
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise misfit(error) from None
        cls._refuse(body.model_extra or {})
        return body

    @classmethod
    def _refuse(cls, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            if name in REFUSED and value not in MEANS_NOTHING.get(name, ()):
                instead = INSTEAD.get(name, "leave it out")
                raise Failure(400, f"{name}: this server does not support it; {instead}.", param=name)
            if name not in REFUSED and name not in HARMLESS:
                logger.debug("a request has the field %.80r, which is unknown here", name)

    def params(self, **own: Any) -> SamplingParams:
        """Say how tokens are chosen, in the engine's words, which judges every value."""
        shared = SamplingParams.model_fields.keys() & Body.model_fields.keys() - {"structured_outputs"}
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        own = {"structured_outputs": self.structure, **own}
        given["trees"] = self.return_drafts
        return SamplingParams(**given | {name: value for name, value in own.items() if value is not None})

    @property
    def structure(self) -> Structure | None:
        """Say what form the output must have, in whichever words it was asked for."""
        try:
            forms = [own.structure for own in (self.response_format, self.structured_outputs) if own]
        except ConfigError as error:
            message = f"structured_outputs: {str(error).removeprefix('Structure.')}"
            raise Failure(400, message, param="structured_outputs") from None
        given = [form for form in forms if form]
        if len(given) > 1:
            raise Failure(
                400,
                "structured_outputs: response_format is given too; leave one out.",
                param="structured_outputs",
            )
        return given[0] if given else None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(Body):
    prompt: str | Ids | list[str] | list[Ids] = Field(description="a text, token ids, or a list of either")
    logprobs: int | None = Field(None, description="alternatives beside each chosen token")
    echo: bool = Field(False, description="repeat the prompt before the text, with its log-probabilities too")

    @property
    def prompts(self) -> list[str | Ids]:
        """List the prompts, however many were given."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise Failure(400, "prompt: it is empty; give a text or token ids.", param="prompt")
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str = Field(description="system, user, assistant, tool, or what the model's template knows")
    content: str | list[dict[str, Any]] | None = Field(None, description="a text, or parts of type text")
    tool_calls: list[Called] | None = Field(None, description="what an assistant has called")

    def plain(self, index: int) -> dict[str, Any]:
        """Return it as a template reads it, its parts joined; it is the message of this index."""
        calls = {"tool_calls": [call.plain for call in self.tool_calls]} if self.tool_calls else {}
        own = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        return {**own, "content": _text(self.content, index), **calls}


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="tokens to write at most; before max_tokens"
    )
    logprobs: bool = Field(False, description="log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="alternatives beside each; needs logprobs"
    )
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")
    tools: list[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: Choice | None = Field(None, description="auto, none, required, or one of the tools")
    parallel_tool_calls: bool = Field(True, description="take more than one call in an answer")

    def offer(self, form: CallFormat | None) -> Offer | None:
        """Say what may be called, where calls are written in this format."""
        offer = make_offer(self.tools, self.tool_choice, parallel=self.parallel_tool_calls, form=form)
        if offer and offer.structure and self.structure:
            raise Failure(
                400,
                "tool_choice: a call that must be made leaves no other form to ask for; leave "
                "response_format and structured_outputs out.",
                param="tool_choice",
            )
        return offer

    @property
    def plain(self) -> list[dict[str, Any]]:
        """Return the messages as a template reads them."""
        return [message.plain(i) for i, message in enumerate(self.messages)]

    @property
    def shown(self) -> int | None:
        """Say how many alternatives are shown beside each token; None: no log-probabilities at all."""
        if self.top_logprobs and not self.logprobs:
            raise Failure(
                400, "top_logprobs: it belongs to logprobs; set logprobs to true.", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tokens: Ids


def read_plain(kind: type[BaseModel], data: bytes) -> Any:
    """Read a small body."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise misfit(error) from None


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise Failure(
                400,
                f"messages.{index}.content: a part of type {part.get('type')!r:.40}; send text alone.",
                param="messages",
            )
    return "".join(part["text"] for part in content)
