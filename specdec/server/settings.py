"""The server's settings; the engine has its own."""

import ipaddress
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from specdec.config.base import MAX_BYTES, Settings, describe_choices, parse_bytes
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
OnFailure = Literal["read", "fail"]
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
        title="accepted API keys, beside SPECDEC_API_KEY and api_key_file. weight=2 after a key doubles "
        "its share of the engine; max_queued=64 limits its choices in flight",
        description="a list of keys, or None; in a file of settings quote one that looks like a number",
    )
    api_key_file: str | None = Field(
        None, title="a file with one key per line; # begins a comment", description="a path, or None"
    )
    allowed_origins: list[str] | None = Field(
        None,
        title="origins whose pages may use the server (CORS); *: all; None: only its own pages",
        description="a list of origins such as https://app.example, or None",
    )
    metrics_open: bool = Field(
        False,
        title="answer /metrics without a key",
        description="True or False",
    )
    ssl_certfile: str | None = Field(
        None,
        title="certificate chain in PEM; the server then speaks HTTPS only",
        description="a path, or None",
    )
    ssl_keyfile: str | None = Field(
        None,
        title="private key in PEM; None: it is in ssl_certfile",
        description="a path, or None",
    )
    ssl_keyfile_password: str | None = Field(
        None,
        repr=False,
        min_length=1,
        title="password of an encrypted key; put it into a file of settings to hide it from other users",
        description="a text, or None; in a file of settings quote one that looks like a number",
    )
    max_body_bytes: int = Field(
        16 << 20, ge=1024, title="maximum bytes of a request body", description="an integer of at least 1024"
    )
    max_prompts: int = Field(
        256, ge=1, title="maximum prompts of a request", description="an integer of at least 1"
    )
    max_answer_values: int = Field(
        1 << 22,
        ge=1,
        title="maximum values of an answer: choices × tokens × (1 + log-probabilities)",
        description="an integer of at least 1",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        title="max_tokens of chats that give none; None: max_new_tokens of generation_config.json, else 4096",
        description=f"an integer from 1 to {MOST_TOKENS}, or None",
    )
    max_queued: int = Field(
        1024,
        ge=1,
        title="maximum choices per model in flight or waiting; beyond, 429",
        description="an integer of at least 1",
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        title="maximum seconds of a request, from arrival to end",
        description="a number above 0",
    )
    stall_timeout: float = Field(
        60.0,
        gt=0,
        title="seconds to wait for a client that does not read",
        description="a number above 0",
    )
    body_timeout: float = Field(
        60.0,
        gt=0,
        title="maximum seconds for receiving a body",
        description="a number above 0",
    )
    idle_timeout: float = Field(
        75.0,
        gt=0,
        title="seconds until an idle connection, or one with an incomplete request head, is closed",
        description="a number above 0",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        title="maximum connections; beyond, the oldest idle one is closed. None: as the limit of open "
        "files allows",
        description="an integer of at least 1, or None",
    )
    step_timeout: float = Field(
        300.0,
        gt=0,
        title="seconds until an engine step counts as hung; all requests then end with an error",
        description="a number above 0",
    )
    exit_on_failure: bool = Field(
        True,
        title="exit with code 70 when the engine hangs or stops; False: stay and answer 503",
        description="True or False",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        title="seconds for running requests at shutdown",
        description="a number of at least 0",
    )
    arenas: int | None = Field(
        None,
        ge=1,
        title="models that may run at once, each in an equal part of memory_bytes; others take turns. "
        "None: 1, on a GPU one per model",
        description="an integer of at least 1, or None",
    )
    weights_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None,
        ge=1,
        le=MAX_BYTES,
        title="memory for the weights of all models; those that do not fit are loaded on demand. None: "
        "of several models 60 % of free memory, on a GPU all of it",
        description='a number of bytes such as 8589934592 or "8GiB", or None',
    )
    switch_after: float = Field(
        3.0,
        ge=0,
        title="seconds that a model runs while others wait for its arena",
        description="a number of at least 0",
    )
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
    max_stored_responses: int = Field(
        1000,
        ge=0,
        title="maximum stored responses of /v1/responses; 0: none",
        description="an integer of at least 0",
    )
    stored_responses_bytes: int = Field(
        64 << 20,
        ge=0,
        title="maximum bytes of stored responses; beyond, the largest caller loses its oldest",
        description="an integer of at least 0",
    )
    stored_responses_seconds: float = Field(
        3600.0,
        gt=0,
        title="seconds after its last use that a response is stored",
        description="a number above 0",
    )
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
        "read",
        title="if a prompt cannot be fetched; read: prefill it here; fail: answer 503 (prefill_lost)",
        description=describe_choices(OnFailure),
    )
    reach_lease_max: float = Field(
        300.0,
        gt=0,
        title="maximum seconds that a prefilled prompt is held for a decode instance",
        description="a number above 0",
    )
    reach_check: Check = Field(
        "first",
        title="which fetched prompts are checked against their checksums; first: the first from each server",
        description=describe_choices(Check),
    )
    log_prompts: bool = Field(False, title="write prompts to the log", description="True or False")
    log_format: Literal["text", "json"] = Field(
        "text",
        title="log format; lines of text, or one JSON object per line",
        description='"text" or "json"',
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
            given = json.loads(value or "{}")
        except RecursionError:
            raise ValueError from None
        if not isinstance(given, dict):
            raise ValueError
        check_variables(given)
        return value

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Return the default variables of the chat template."""
        return dict(json.loads(self.chat_template_kwargs or "{}"))
