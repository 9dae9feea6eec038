"""The router's settings."""

from typing import Literal, Self

from pydantic import Field, model_validator

from specdec.config.base import Settings, contradiction, describe_choices

Protocol = Literal["vllm", "sglang"]
URLS = "a list of addresses such as http://10.0.0.7:8000, or None"


class RouteConfig(Settings):
    """Where the router listens, which replicas it knows, and when it tries another one."""

    replicas: list[str] | None = Field(
        None, title="replicas that read prompts and write answers; several between commas", description=URLS
    )
    replicas_file: str | None = Field(
        None,
        title="a file with a replica on each line, read again when it changes; prefill or decode before an "
        "address is its role, # begins a comment",
        description="a path, or None",
    )
    replicas_dns: str | None = Field(
        None,
        title="a host name whose addresses are replicas, such as that of a headless service; it is looked up "
        "again and again",
        description="an address with a port such as http://replicas.example:8000, or None",
    )
    prefill: list[str] | None = Field(
        None,
        title="replicas that only read prompts, for those of decode; ?bootstrap=PORT behind an address is "
        "its side channel, if not that of bootstrap_port",
        description=URLS,
    )
    decode: list[str] | None = Field(
        None, title="replicas that write the answers to prompts that prefill has read", description=URLS
    )
    pd_protocol: Protocol = Field(
        "vllm",
        title="how the two learn of each other; vllm: one after the other, by kv_transfer_params; sglang: "
        "both at once, by a room at the side channel of the first",
        description=describe_choices(Protocol),
    )
    bootstrap_port: int = Field(
        5600,
        ge=1,
        le=65535,
        title="port of the side channels of prefill, for sglang",
        description="1 to 65535",
    )
    prefill_min_bytes: int = Field(
        1024,
        ge=0,
        title="bytes of a prompt, less those of the beginning that decode knows, from which prefill reads it",
        description="an integer of at least 0",
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        title="address to listen at; 0.0.0.0 is every one of this machine",
        description="an address or a host name",
    )
    port: int = Field(
        8080, ge=0, le=65535, title="port to listen at", description="0 to 65535; 0: any free one"
    )
    ssl_certfile: str | None = Field(
        None,
        title="a certificate in PEM, with those that signed it behind it: the router then speaks HTTPS alone",
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
        title="the password of an encrypted key",
        description="a text, or None",
    )
    check_period: float = Field(
        1.0, gt=0, title="seconds between two checks of a replica's /ready", description="a number above 0"
    )
    check_timeout: float = Field(
        5.0, gt=0, title="seconds that a check may take", description="a number above 0"
    )
    failures: int = Field(
        3,
        ge=1,
        title="checks that fail in a row, or connections that are refused, until a replica is down",
        description="an integer of at least 1",
    )
    successes: int = Field(
        1,
        ge=1,
        title="checks that succeed in a row until a replica is up",
        description="an integer of at least 1",
    )
    attempts: int = Field(
        3,
        ge=1,
        title="replicas that are asked at most, one after the other, until one begins to answer",
        description="an integer of at least 1",
    )
    connect_timeout: float = Field(
        2.0, gt=0, title="seconds that connecting to a replica may take", description="a number above 0"
    )
    answer_timeout: float = Field(
        660.0,
        gt=0,
        title="seconds for which a replica may send nothing while it answers",
        description="a number above 0",
    )
    load_factor: float = Field(
        1.25,
        ge=1,
        title="requests of a replica at most, as a multiple of the mean",
        description="a number of at least 1",
    )
    max_requests: int = Field(
        4096,
        ge=1,
        title="requests under way at most, of one address half as many; beyond, they are refused with 429",
        description="an integer of at least 1",
    )
    max_body_bytes: int = Field(
        16 << 20, ge=1024, title="bytes of a request at most", description="an integer of at least 1024"
    )
    body_timeout: float = Field(
        60.0,
        gt=0,
        title="seconds that the body of a request may take to come",
        description="a number above 0",
    )
    stall_timeout: float = Field(
        60.0,
        gt=0,
        title="seconds that an answer waits for a client that does not read",
        description="a number above 0",
    )
    idle_timeout: float = Field(
        75.0,
        gt=0,
        title="seconds that a connection may ask for nothing, and a request's head may take",
        description="a number above 0",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        title="connections of clients at most; beyond, the oldest that asks for nothing is closed for a new "
        "one. None: a third of what the process's limit of open files leaves",
        description="an integer of at least 1, or None",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        title="seconds that requests under way may go on when the router is told to stop",
        description="a number of at least 0",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        title="how the log is written: as lines of text, or as one JSON object on each line",
        description='"text" or "json"',
    )

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        listed = self.replicas or self.prefill or self.decode
        if not (listed or self.replicas_file or self.replicas_dns):
            raise contradiction(
                "replicas",
                "there are none; give --replicas URL,URL, or --prefill URL,URL and --decode URL,URL, or "
                "--replicas-file FILE, or --replicas-dns URL.",
            )
        if self.replicas_file and (listed or self.replicas_dns):
            raise contradiction("replicas_file", "the file names all replicas; give no others beside it.")
        if self.replicas_dns and listed:
            raise contradiction("replicas_dns", "the name stands for all replicas; give no others beside it.")
        if bool(self.prefill) != bool(self.decode):
            missing, other = ("decode", "prefill") if self.prefill else ("prefill", "decode")
            raise contradiction(missing, f"{other} alone answers nothing; give --{missing} too.")
        if self.replicas and self.prefill:
            raise contradiction("replicas", "give either --replicas, or --prefill and --decode.")
        return self
