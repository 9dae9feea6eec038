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
        title="address to listen on; 0.0.0.0: all of this machine's",
        description="an address or a host name",
    )
    port: int = Field(
        8000, ge=0, le=65535, title="port to listen on", description="0 to 65535; 0: any free one"
    )
    served_model_name: list[str] | None = Field(
        None,
        title="model names that requests may use; None: the folder's name",
        description="a list of names, or None",
    )
    api_key: list[str] | None = Field(
        None,
        repr=False,
        title="accepted API keys (Authorization: Bearer KEY); SPECDEC_API_KEY and the lines of "
        "api_key_file are keys too. A key may be followed by weight=2, its share of the "
        "engine beside others with 1, and max_queued=64, the most choices it may have in "
        "flight",
        description="a list of keys, or None; in a file of settings quote one that looks like a number",
    )
    api_key_file: str | None = Field(
        None, title="a file with one key on each line; # begins a comment", description="a path, or None"
    )
    allowed_origins: list[str] | None = Field(
        None,
        title="origins whose pages may use the server (CORS); * is every one. None: "
        "this server's own pages only",
        description="a list of origins such as https://app.example, or None",
    )
    metrics_open: bool = Field(
        False,
        title="answer /metrics without a key, for scrapers and routers that have none",
        description="True or False",
    )
    ssl_certfile: str | None = Field(
        None,
        title="certificate chain in PEM: the server then speaks HTTPS only",
        description="a path, or None",
    )
    ssl_keyfile: str | None = Field(
        None,
        title="the certificate's private key in PEM; None: it stands in ssl_certfile",
        description="a path, or None",
    )
    ssl_keyfile_password: str | None = Field(
        None,
        repr=False,
        min_length=1,
        title="the password of an encrypted key; in a file of settings other users do not see it",
        description="a text, or None; in a file of settings quote one that looks like a number",
    )
    max_body_bytes: int = Field(
        16 << 20, ge=1024, title="maximum bytes of a request", description="an integer of at least 1024"
    )
    max_prompts: int = Field(
        256, ge=1, title="maximum prompts of a request", description="an integer of at least 1"
    )
    max_answer_values: int = Field(
        1 << 22,
        ge=1,
        title="maximum tokens and log-probabilities of an answer: choices times tokens times one "
        "more than their log-probabilities",
        description="an integer of at least 1",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        title="max_tokens of chats that give none; None: max_new_tokens of the folder's "
        "generation_config.json, else 4096",
        description=f"an integer from 1 to {MOST_TOKENS}, or None",
    )
    max_queued: int = Field(
        1024,
        ge=1,
        title="maximum choices of each model in flight or waiting; beyond, requests get 429",
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
        title="seconds that a stream waits for a client that does not read",
        description="a number above 0",
    )
    body_timeout: float = Field(
        60.0,
        gt=0,
        title="maximum seconds for receiving a request's body",
        description="a number above 0",
    )
    idle_timeout: float = Field(
        75.0,
        gt=0,
        title="seconds after which an idle connection is closed, and that a request's head may take",
        description="a number above 0",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        title="maximum connections; beyond, the oldest idle one is closed for a new one. None: what "
        "the limit of open files leaves",
        description="an integer of at least 1, or None",
    )
    step_timeout: float = Field(
        300.0,
        gt=0,
        title="seconds after which a step of the engine counts as hung: all requests end with an error",
        description="a number above 0",
    )
    exit_on_failure: bool = Field(
        True,
        title="exit with code 70 when the engine hangs or has stopped, so that a supervisor "
        "restarts it; False: stay, and answer 503",
        description="True or False",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        title="seconds that running requests have to finish at shutdown",
        description="a number of at least 0",
    )
    arenas: int | None = Field(
        None,
        ge=1,
        title="number of models that may run at once, each in an equal part of memory_bytes; the others wait "
        "for their turn. None: 1, on a GPU one for each model",
        description="an integer of at least 1, or None",
    )
    weights_bytes: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        None,
        ge=1,
        le=MAX_BYTES,
        title="memory for the weights of all models; those that do not fit are loaded when they are asked "
        "for, in place of others. None: of several 60 % of what is free at the start, on a GPU all of it",
        description='a number of bytes such as 8589934592 or "8GiB", or None',
    )
    switch_after: float = Field(
        3.0,
        ge=0,
        title="seconds that a model runs while others wait for its arena, on average where keys have weights",
        description="a number of at least 0",
    )
    keep_alive: float = Field(
        -1.0,
        ge=-1,
        title="seconds that a model stays loaded after its last request; -1: for good; a request's "
        "own keep_alive takes precedence",
        description="a number of at least 0, or -1",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto",
        title="format of the model's tool calls; auto: detected in its chat template; none: tools "
        "are refused",
        description=describe_choices(ToolCallParser),
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        title="markers of the model's thinking; auto: detected in its chat template; none: thinking "
        "stays in the text",
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
        title="maximum stored responses of /v1/responses, for previous_response_id; 0: none",
        description="an integer of at least 0",
    )
    stored_responses_bytes: int = Field(
        64 << 20,
        ge=0,
        title="bytes that they may take together; beyond, the oldest of the caller that has most are evicted",
        description="an integer of at least 0",
    )
    stored_responses_seconds: float = Field(
        3600.0,
        gt=0,
        title="seconds after its last use for which a response is kept",
        description="a number above 0",
    )
    role: Role | None = Field(
        None,
        title="disaggregated serving: prefill, decode, or both, as each request asks. "
        "None: both if SPECDEC_REACH_SECRET is set",
        description=f"{describe_choices(Role)}, or None",
    )
    reach_host: str = Field(
        "127.0.0.1",
        min_length=1,
        title="address of the side channel, by which other servers reach this one: they are told it, so it "
        "is to be one of this machine and theirs",
        description="an address or a host name, no wildcard",
    )
    reach_port: int = Field(
        5600,
        ge=0,
        le=65535,
        title="port of the side channel; SGLang's routers call it the bootstrap port",
        description="0 to 65535; 0: any free one",
    )
    reach_peers: list[str] | None = Field(
        None,
        title="servers from which prompts may be fetched, by their side channels. "
        "Without a port of their own they have this reach_port. None: 127.0.0.1, at this reach_port and "
        "at 5600",
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
        title="maximum seconds that a prefilled prompt is held for the server that fetches it",
        description="a number above 0",
    )
    reach_check: Check = Field(
        "first",
        title="which fetched prompts are compared with their checksums; first: the first from each server",
        description=describe_choices(Check),
    )
    log_prompts: bool = Field(False, title="write prompts to the log", description="True or False")
    log_format: Literal["text", "json"] = Field(
        "text",
        title="format of the log: lines of text, or one JSON object per line",
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
