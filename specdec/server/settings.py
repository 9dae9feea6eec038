"""Settings of the server; the engine has its own."""

import ipaddress
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from specdec.config.base import MAX_BYTES, Settings, describe_choices, parse_bytes
from specdec.config.fields import integer, number, path, positive, switch
from specdec.config.sampling import MOST_TOKENS
from specdec.config.template import check_variables

ToolCallParser = Literal[
    "auto",
    "hermes",
    "qwen3_coder",
    "nemotron_json",
    "granite",
    "mistral",
    "mistral_v3",
    "llama3_json",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "none",
]
ReasoningParser = Literal[
    "auto",
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "nemotron_v3",
    "kimi_k2",
    "glm45",
    "mistral",
    "seed_oss",
    "none",
]

Role = Literal["prefill", "decode", "both"]
OnFailure = Literal["recompute", "fail"]
Check = Literal["first", "always", "never"]
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(\.(?!-)[A-Za-z0-9-]{1,63})*\.?", re.ASCII)


class ServerConfig(Settings):
    """Where the server listens, who may use it, and its limits."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        title="address to listen on; 0.0.0.0: all of this machine",
        description="an address or a host name",
    )
    port: int = Field(
        8000, ge=0, le=65535, title="port to listen on", description="0 to 65535; 0: any free one"
    )
    served_model_name: list[str] | None = Field(
        None,
        title="model names for requests; None: the folder's name",
        description="a list of names, or None",
    )
    api_key: list[str] | None = Field(
        None,
        repr=False,
        title="accepted API keys, in addition to SPECDEC_API_KEY and api_key_file. weight=2 after a key "
        "doubles its share of the engine; max_queued=64 limits its choices in flight",
        description="a list of keys, or None; in a settings file quote one that looks like a number",
    )
    api_key_file: str | None = path("a file with one key per line; # begins a comment")
    allowed_origins: list[str] | None = Field(
        None,
        title="origins whose pages may use the server (CORS); *: all; None: only its own pages",
        description="a list of origins such as https://app.example, or None",
    )
    metrics_open: bool = switch(False, "answer /metrics without a key")
    ssl_certfile: str | None = path("certificate chain in PEM; the server then speaks HTTPS only")
    ssl_keyfile: str | None = path("private key in PEM; None: it is in ssl_certfile")
    ssl_keyfile_password: str | None = Field(
        None,
        repr=False,
        min_length=1,
        title="password of an encrypted key; use a settings file to hide it from other users",
        description="a string, or None; in a settings file quote one that looks like a number",
    )
    max_body_bytes: int = integer(16 << 20, "maximum bytes of a request body", least=1024)
    max_prompts: int = integer(256, "maximum prompts of a request")
    max_answer_values: int = integer(
        1 << 22, "maximum values of an answer: choices × tokens × (1 + log-probabilities)"
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        title="max_tokens of chats that give none; None: max_new_tokens of generation_config.json, else 4096",
        description=f"an integer from 1 to {MOST_TOKENS}, or None",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        title="what a request's missing sampling parameters are: the model's in generation_config.json, or "
        "OpenAI's, which are temperature 1 without filters",
        description="'model' or 'openai'",
    )
    max_queued: int = integer(1024, "maximum choices per model in flight or waiting; beyond, 429")
    request_timeout: float = positive(600.0, "maximum seconds of a request, from arrival to end")
    stall_timeout: float = positive(60.0, "seconds to wait for a client that does not read")
    body_timeout: float = positive(60.0, "maximum seconds for receiving a body")
    idle_timeout: float = positive(
        75.0, "seconds until an idle connection, or one with an incomplete request head, is closed"
    )
    max_connections: int | None = integer(
        None,
        "maximum connections; beyond, the oldest idle one is closed. None: as the limit of open files allows",
    )
    step_timeout: float = positive(
        300.0, "seconds until an engine step counts as hung; all requests then end with an error"
    )
    exit_on_failure: bool = switch(
        True, "exit with code 70 when the engine hangs or stops; False: stay and answer 503"
    )
    drain_seconds: float = number(30.0, "seconds for running requests at shutdown")
    arenas: int | None = integer(
        None,
        "models that may run at once, each in an equal part of memory_bytes; others take turns. "
        "None: 1, on a GPU one per model",
    )
    weights_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None,
        ge=1,
        le=MAX_BYTES,
        title="memory for the weights of all models; those that do not fit are loaded on demand. None: "
        "of several models 60 % of free memory, on a GPU all of it",
        description='a number of bytes such as 8589934592 or "8GiB", or None',
    )
    switch_after: float = number(3.0, "seconds that a model runs while others wait for its arena")
    keep_alive: float = Field(
        -1.0,
        ge=-1,
        title="seconds that a model stays loaded after its last request; -1: forever. Requests may "
        "override it",
        description="a number of at least 0, or -1",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        title="format of tool calls; auto: detected in the chat template; none: refuse tools",
        description=describe_choices(ToolCallParser),
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        title="markers of thinking; auto: detected in the chat template; none: thinking stays in the text",
        description=describe_choices(ReasoningParser),
    )
    chat_template_kwargs: str | None = Field(
        None,
        title='default variables of the chat template, such as {"enable_thinking": false}',
        description="a JSON object as text, or None",
    )
    max_stored_responses: int = integer(1000, "maximum stored responses of /v1/responses; 0: none", least=0)
    stored_responses_bytes: int = integer(
        64 << 20, "maximum bytes of stored responses; beyond, the largest caller loses its oldest", least=0
    )
    stored_responses_seconds: float = positive(3600.0, "seconds after its last use that a response is stored")
    role: Role | None = Field(
        None,
        title="disaggregated serving; prefill, decode, or both, as each request asks. None: both if "
        "SPECDEC_REACH_SECRET is set",
        description=f"{describe_choices(Role)}, or None",
    )
    reach_host: str = Field(
        "127.0.0.1",
        min_length=1,
        title="address of the side channel, as other servers reach it",
        description="an address or a host name, no wildcard",
    )
    reach_port: int = Field(
        5600,
        ge=0,
        le=65535,
        title="port of the side channel (SGLang: bootstrap port)",
        description="0 to 65535; 0: any free one",
    )
    reach_peers: list[str] | None = Field(
        None,
        title="side channels from which prompts may be fetched; the default port is this reach_port. "
        "None: 127.0.0.1, at this reach_port and 5600",
        description="a list of networks such as 10.1.0.0/16, addresses and host names, each with :PORT or "
        "without, or None",
    )
    reach_on_failure: OnFailure = Field(
        "recompute",
        title="if a prompt cannot be fetched; recompute: prefill it here; fail: answer 503 (prefill_lost)",
        description=describe_choices(OnFailure),
    )
    reach_lease_max: float = positive(
        300.0, "maximum seconds that a prefilled prompt is held for a decode instance"
    )
    reach_check: Check = Field(
        "first",
        title="which fetched prompts are checked against their checksums; first: the first from each server",
        description=describe_choices(Check),
    )
    log_prompts: bool = switch(False, "write prompts to the log")
    log_format: Literal["text", "json"] = Field(
        "text", title="log format; lines of text, or one JSON object per line", description='"text" or "json"'
    )

    @field_validator("reach_host")
    @classmethod
    def _check_reach_host(cls, value: str) -> str:
        try:
            is_any = ipaddress.ip_address(value).is_unspecified
        except ValueError:
            is_any = not HOST_NAME.fullmatch(value)
        if is_any:
            raise ValueError
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, value: str | None) -> str | None:
        try:
            variables = json.loads(value or "{}")
        except RecursionError:
            raise ValueError from None
        if not isinstance(variables, dict):
            raise ValueError
        check_variables(variables)
        return value

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Return the default variables of the chat template."""
        return dict(json.loads(self.chat_template_kwargs or "{}"))
