"""Request bodies, with the field names of OpenAI's API and of vLLM's extensions."""

import math
import re
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
)

from specdec.config.sampling import MOST_TOKENS, SamplingParams
from specdec.config.structured import Structure
from specdec.config.template import Variables
from specdec.errors import ConfigError
from specdec.server.failures import SEVERAL, Failure, Names, renamed, validation_failure
from specdec.server.fields import given_fields, refuse, unknown
from specdec.server.messages import ChatMessage, Many
from specdec.server.reach.bodies import (
    Asked,
    BootstrapFields,
    Name,
    Port,
    Room,
    TransferParams,
    each_of,
    transfer_work,
)
from specdec.server.settings import Role
from specdec.server.tools.bodies import Tool
from specdec.server.tools.offer import GivenChoice, ToolOffer, make_offer
from specdec.text.answers.calls import CallFormat

Ids = Many[StrictInt]
BiasedId = Annotated[int, Field(gt=-(1 << 32), lt=1 << 32)]
"""Larger ids could be chosen to collide in a hash table."""
BUDGETS = ("thinking_token_budget", "thinking_budget", "max_thinking_tokens")
"""Fields that bound thinking: vLLM's, Qwen's, and one that several clients send."""
DURATION = re.compile(r"(?P<number>-?\d{1,12}(\.\d{1,9})?)(?P<unit>s|m|h)?", re.ASCII)
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
Duration = StrictInt | StrictFloat | str
"""Seconds, or a string with a unit."""
KEPT = "seconds that the model stays loaded afterwards, or 5m; 0 for none, -1 forever"
STRUCTURED = "structured_outputs"
"""The engine's name of structured output fields."""
SCHEMA = "response_format.json_schema.schema"
ASKED: Mapping[str, Names] = {
    "structured_outputs": {f"{STRUCTURED}.json_schema": "structured_outputs.json"},
    "response_format": {STRUCTURED: "response_format", f"{STRUCTURED}.json_schema": SCHEMA},
    "tools": {STRUCTURED: "tools", f"{STRUCTURED}.structural_tag": "tools"},
}
"""Client field names for the engine's, by the field that requests structured output."""
B = TypeVar("B", bound="RequestBody")


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = Field(None, description="in EBNF; its first rule is root")
    structural_tag: dict[str, Any] | str | None = Field(None, description="as in vLLM")

    @property
    def structure(self) -> Structure:
        fields = {"json_schema" if name == "json_" else name: value for name, value in self}
        constraints = {name: value for name, value in fields.items() if value not in (None, False)}
        if len(constraints) != 1:
            problem = f"{len(constraints)} are given; leave" if constraints else "none is given; give"
            names = ", ".join(constraints or fields).replace("json_schema", "json", 1)
            raise Failure(
                400, f"{STRUCTURED}: give exactly one constraint: {problem} one of {names}.", param=STRUCTURED
            )
        return Structure(**constraints)


class NamedSchema(BaseModel):
    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def structure(self) -> Structure | None:
        if self.type == "json_schema":
            if self.json_schema is None:
                raise Failure(400, "response_format.json_schema: it is required.", param="response_format")
            return Structure(json_schema=self.json_schema.schema_)
        return Structure(json_object=True) if self.type == "json_object" else None


class StreamOptions(BaseModel):
    include_usage: bool | None = Field(None, description="end with a chunk that has the usage and no choices")
    continuous_usage_stats: bool | None = Field(None, description="put the usage so far into every chunk")


class RequestBody(BaseModel):
    """Fields of completions and chats. Null counts as absent; bounds are as in `SamplingParams`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = Field(None, description="the served model's name, as /v1/models lists it")
    max_tokens: int | None = Field(None, description="maximum tokens")
    temperature: float | None = Field(None, description="0: greedy decoding; default 1")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | Many[str] | None = Field(None, description="strings that end the output")
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string in the text")
    skip_special_tokens: bool | None = Field(None, description="false: keep special tokens in the text")
    allowed_token_ids: Ids | None = Field(None, description="restrict the output to these tokens")
    bad_words: Many[str] | None = Field(None, description="words that the output may not contain")
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, description="minimum tokens")
    response_format: ResponseFormat | None = Field(None, description="structured output")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="structured output, in vLLM's format"
    )
    prompt_logprobs: int | None = Field(None, description="alternatives for each prompt token")
    seed: int | None = Field(None, description="the same seed gives the same text, with drafts and without")
    logit_bias: dict[BiasedId, float] | None = None
    cache_salt: SkipValidation[str | None] = Field(
        None, description="share cached prefixes and outputs only within this key and salt"
    )
    n: int | None = Field(None, description="choices for each prompt")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="return token ids too")
    return_origins: bool = Field(
        False,
        description="return [text, origin] pieces: 0 is the target's own token, n a draft token at depth n",
    )
    return_metrics: bool = Field(False, description="return speculation metrics at the end")
    speculate: bool | None = Field(
        None, description="false: no drafts for this request; the text is the same"
    )
    keep_alive: Duration | None = Field(None, description=KEPT)
    kv_transfer_params: TransferParams | None = Field(
        None, description="disaggregated prefill, in vLLM's format"
    )
    bootstrap_host: Name | Many[Name] | None = Field(
        None, description="disaggregated prefill, in SGLang's format: the prefill host, one per prompt"
    )
    bootstrap_port: Port | Many[Port | None] | None = Field(None, description="its side channel's port")
    bootstrap_room: Room | Many[Room] | None = Field(None, description="the id of the prompt on both servers")
    return_drafts: bool = Field(
        False,
        description="return each verify step's draft tree: token_ids, texts and parents of its nodes "
        "(-1: the root), accepted nodes, and the bonus token",
    )

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a body; raise for unsupported fields."""
        fields = given_fields(data)
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise validation_failure(error) from None
        refuse(body.model_extra or {}, body.said)
        if fields.get("stream_options") and not body.stream and not body.is_for_prefill:
            raise Failure(
                400,
                "stream_options: it needs stream; set stream to true or leave it out.",
                param="stream_options",
            )
        return body

    @property
    def is_for_prefill(self) -> bool:
        """Whether a proxy requests only the prefill, despite other fields."""
        return bool(self.kv_transfer_params and self.kv_transfer_params.do_remote_decode)

    def asked(self, role: Role | None, prompts: int = 1) -> Asked | None:
        """Return the work another server does for the request, by this server's role; None: none."""
        return transfer_work(self.kv_transfer_params, self._rooms(prompts), role)

    def _rooms(self, prompts: int) -> list[BootstrapFields] | None:
        if self.bootstrap_room is None:
            for field in ("bootstrap_host", "bootstrap_port"):
                if getattr(self, field) is not None:
                    raise Failure(
                        400, f"bootstrap_room: it is required with {field}; give it.", param="bootstrap_room"
                    )
            return None
        per_prompt = partial(each_of, prompts=prompts, n=self.n or 1)
        rooms = per_prompt("bootstrap_room", self.bootstrap_room)
        hosts = per_prompt("bootstrap_host", self.bootstrap_host) if self.bootstrap_host else [None] * prompts
        ports = per_prompt("bootstrap_port", self.bootstrap_port) if self.bootstrap_port else [None] * prompts
        return [BootstrapFields(*values) for values in zip(hosts, ports, rooms, strict=True)]

    @property
    def ignored(self) -> list[str]:
        """Unknown fields, which are ignored."""
        return unknown(self.model_extra or {})

    @property
    def said(self) -> dict[str, Any]:
        """Values at which unsupported fields have no effect, such as `best_of` equal to `n`."""
        lengths = dict.fromkeys(("max_completion_tokens", "max_new_tokens"), self.max_tokens)
        return {"best_of": self.n or 1, "min_new_tokens": self.min_tokens, **lengths}

    def params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """Return the sampling parameters, with the model's defaults; the engine validates every value."""
        shared = SamplingParams.model_fields.keys() & RequestBody.model_fields.keys() - {"structured_outputs"}
        given = {name: value for name in shared if (value := getattr(self, name)) is not None}
        fields = {**defaults, **given}
        overrides = {"structured_outputs": self.structure, **overrides}
        fields["trees"] = self.return_drafts
        return SamplingParams(
            **fields | {name: value for name, value in overrides.items() if value is not None}
        )

    @cached_property
    def structure(self) -> Structure | None:
        """Return the required output structure, from either field."""
        structures = []
        for name, source in (
            ("response_format", self.response_format),
            ("structured_outputs", self.structured_outputs),
        ):
            try:
                structures += [structure] if source and (structure := source.structure) else []
            except ConfigError as error:
                message = f"{STRUCTURED}.{str(error).removeprefix('Structure.')}"
                raise renamed(Failure(400, message, param=STRUCTURED), ASKED[name]) from None
        if len(structures) > 1:
            raise Failure(
                400,
                "structured_outputs: response_format is given too; leave one out.",
                param="structured_outputs",
            )
        return structures[0] if structures else None

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds to keep the model loaded after this request; None: not given."""
        value = self.keep_alive
        if value is None:
            return None
        match = DURATION.fullmatch(str(value))
        seconds = float(match["number"]) * SECONDS[match["unit"] or "s"] if match else -math.inf
        if seconds < 0 and seconds != -1:
            raise Failure(
                400,
                f"keep_alive: {value!r:.40} is not a duration; {SEVERAL['keep_alive']}.",
                param="keep_alive",
            )
        return seconds

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionBody(RequestBody):
    prompt: str | Ids | Many[str] | Many[Ids] = Field(description="a string, token ids, or a list of either")
    logprobs: int | None = Field(None, description="alternatives for each token")
    echo: bool = Field(False, description="return the prompt before the text, with its log-probabilities")

    @property
    def scored(self) -> int | None:
        """Return the number of logprobs for each prompt token; None: the prompt is not scored."""
        echoed = self.logprobs if self.echo else None
        if self.prompt_logprobs is not None and echoed not in (None, self.prompt_logprobs):
            raise Failure(
                400,
                f"prompt_logprobs: echo returns as many as logprobs, {echoed}; leave it out.",
                param="prompt_logprobs",
            )
        minimum = 0 if self.echo and self.max_tokens == 0 else None
        return next((count for count in (echoed, self.prompt_logprobs, minimum) if count is not None), None)

    @property
    def prompts(self) -> list[str | Ids]:
        """Return the prompts as a list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise Failure(400, "prompt: it is empty; give a string or token ids.", param="prompt")
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class ChatBody(RequestBody):
    messages: Many[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="maximum tokens; takes precedence over max_tokens"
    )
    logprobs: bool = Field(False, description="log-probabilities of the chosen tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="alternatives for each token; needs logprobs"
    )
    add_generation_prompt: bool = True
    add_special_tokens: Literal[False] = Field(False, description="the chat template adds them")
    chat_template_kwargs: Variables | None = Field(None, description="variables of the chat template")
    reasoning_effort: str | None = Field(
        None, description="sets the template's variable, or switches its thinking"
    )
    enable_thinking: StrictBool | None = Field(None, description="switch thinking, if the template can")
    include_reasoning: bool = Field(True, description="false: omit the thinking")
    thinking_token_budget: int | None = Field(None, ge=0, description="maximum tokens of thinking")
    thinking_budget: int | None = Field(None, ge=0, description="the same, as Qwen names it")
    max_thinking_tokens: int | None = Field(None, ge=0, description="the same once more")
    tools: Many[Tool] | None = Field(None, description="functions that the model may call")
    tool_choice: GivenChoice | None = Field(
        None, description="auto, none, required, one of the tools, or some of them as allowed_tools"
    )
    parallel_tool_calls: bool = Field(True, description="allow several calls in an answer")

    def offer(self, form: CallFormat | None, *, told: bool = True) -> ToolOffer | None:
        """Return the tools that may be called, in the model's format, if its template states tools."""
        parallel = self.parallel_tool_calls
        offer = make_offer(self.tools, self.tool_choice, parallel=parallel, form=form, told=told)
        if offer and offer.structure and self.structure:
            raise Failure(
                400,
                "tool_choice: a forced call cannot be combined with response_format or "
                "structured_outputs; leave them out.",
                param="tool_choice",
            )
        return offer

    @property
    def budget(self) -> tuple[str, int] | None:
        """Return the field that limits thinking, and its limit in tokens."""
        budgets = {name: value for name in BUDGETS if (value := getattr(self, name)) is not None}
        if len({*budgets.values()}) > 1:
            name = list(budgets)[-1]
            raise Failure(400, f"{name}: {' and '.join(budgets)} differ; give one.", param=name)
        return next(iter(budgets.items()), None)

    @property
    def shown(self) -> int | None:
        """Return the number of alternatives for each token; None: no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise Failure(400, "top_logprobs: it needs logprobs; set logprobs to true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
