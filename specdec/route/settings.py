"""The router's settings."""

from typing import Literal, Self

from pydantic import Field, model_validator

from specdec.config.base import Settings, contradiction, describe_choices
from specdec.config.fields import integer, number, path, positive

Protocol = Literal["vllm", "sglang"]
URLS = "a list of addresses such as http://10.0.0.7:8000, or None"


class RouteConfig(Settings):
    """Where the router listens, which replicas it knows, and when it tries another one."""

    replicas: list[str] | None = Field(None, title="replicas that prefill and decode", description=URLS)
    replicas_file: str | None = path(
        "a file with one replica per line, after prefill or decode if it has a role; read again "
        "when it changes"
    )
    replicas_dns: str | None = Field(
        None,
        title="a host name whose addresses are replicas; looked up every check_period",
        description="an address with a port such as http://replicas.example:8000, or None",
    )
    prefill: list[str] | None = Field(
        None,
        title="prefill instances; ?bootstrap=PORT after an address overrides bootstrap_port",
        description=URLS,
    )
    decode: list[str] | None = Field(None, title="decode instances", description=URLS)
    pd_protocol: Protocol = Field(
        "vllm",
        title="how prefill and decode instances are paired; vllm: one after the other, by "
        "kv_transfer_params; sglang: both at once, by room",
        description=describe_choices(Protocol),
    )
    bootstrap_port: int = Field(
        5600,
        ge=1,
        le=65535,
        title="side channel port of prefill instances, for sglang",
        description="1 to 65535",
    )
    prefill_min_bytes: int = integer(
        1024, "minimum uncached bytes of a prompt to send it to a prefill instance", least=0
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        title="address to listen on; 0.0.0.0: all of this machine",
        description="an address or a host name",
    )
    port: int = Field(
        8080, ge=0, le=65535, title="port to listen on", description="0 to 65535; 0: any free one"
    )
    ssl_certfile: str | None = path("certificate chain in PEM; the router then speaks HTTPS only")
    ssl_keyfile: str | None = path("private key in PEM; None: it is in ssl_certfile")
    ssl_keyfile_password: str | None = Field(
        None,
        repr=False,
        min_length=1,
        title="password of an encrypted key",
        description="a text, or None",
    )
    check_period: float = positive(1.0, "seconds between two checks of /ready")
    check_timeout: float = positive(5.0, "maximum seconds of a check")
    failures: int = integer(3, "failures in a row after which a replica is down")
    successes: int = integer(1, "successes in a row after which a replica is up")
    attempts: int = integer(3, "maximum replicas tried for a request")
    connect_timeout: float = positive(2.0, "maximum seconds to connect to a replica")
    answer_timeout: float = positive(660.0, "maximum seconds between two bytes of a replica's answer")
    load_factor: float = number(1.25, "maximum requests of a replica as a multiple of the mean", least=1)
    max_requests: int = integer(
        4096, "maximum requests in flight, half of them from one address; beyond, 429"
    )
    max_body_bytes: int = integer(16 << 20, "maximum bytes of a request body", least=1024)
    body_timeout: float = positive(60.0, "maximum seconds for receiving a body")
    stall_timeout: float = positive(60.0, "seconds to wait for a client that does not read")
    idle_timeout: float = positive(
        75.0, "seconds until an idle connection, or one with an incomplete request head, is closed"
    )
    max_connections: int | None = integer(
        None,
        "maximum client connections; beyond, the oldest idle one is closed. None: a third of what "
        "the limit of open files allows",
    )
    drain_seconds: float = number(30.0, "seconds for running requests at shutdown")
    log_format: Literal["text", "json"] = Field(
        "text",
        title="log format; lines of text, or one JSON object per line",
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
            raise contradiction(missing, f"{other} instances cannot answer alone; give --{missing} too.")
        if self.replicas and self.prefill:
            raise contradiction("replicas", "give either --replicas, or --prefill and --decode.")
        return self
