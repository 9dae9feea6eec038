"""Settings of `specdec ray`: placement, scaling, and the ingress. `specdec serve` has its own."""

import argparse
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import Field, model_validator

from specdec.config.base import Settings, contradiction
from specdec.config.engine import EngineConfig
from specdec.config.fields import integer, number, positive
from specdec.config.file import MODEL, fill_from
from specdec.config.options import settings_from
from specdec.models.folder import find_models
from specdec.server.origins import is_local
from specdec.server.settings import ServerConfig

NOT_SERVED = frozenset({"ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "role", "reach_host"})
"""Settings of `specdec serve` that replicas on Ray cannot have: Ray's proxy speaks HTTP to clients."""
PREFILL, DECODE = "prefill", "decode"
"""Roles of instances."""
SECRET = "SPECDEC_REACH_SECRET"
"""Environment variable with the secret that prefill and decode instances share."""


class RayConfig(Settings):
    """Replicas on Ray, and how the ingress chooses among them."""

    num_replicas: int = integer(1, "replicas; the minimum if max_replicas is set")
    max_replicas: int | None = integer(None, "maximum replicas, added under load. None: num_replicas")
    scale_down_delay: float = positive(
        60.0, "seconds that fewer replicas must suffice before one is removed with its cached prefixes"
    )
    prefill: int | None = integer(None, "prefill instances, instead of num_replicas")
    decode: int | None = integer(None, "decode instances, with prefill")
    prefill_min_bytes: int = integer(
        1024, "minimum uncached bytes of a prompt to send it to a prefill instance", least=0
    )
    num_cpus: float = positive(1.0, "CPU cores per replica; also its threads")
    num_gpus: float = number(0.0, "GPUs per replica; 0: CPU")
    ray_address: str | None = Field(
        None,
        min_length=1,
        title="cluster to join; auto: the one on this machine. None: start Ray here, until the command ends",
        description="an address such as auto or ray://head:10001, or None",
    )
    num_ingress: int = integer(1, "ingress replicas; each is a process on one core")
    load_factor: float = number(1.25, "maximum requests of a replica as a multiple of the mean", least=1)
    attempts: int = integer(3, "maximum replicas tried for a request")
    choice_timeout: float = positive(30.0, "maximum seconds to wait for a replica; then 503")
    connect_timeout: float = positive(2.0, "maximum seconds to connect to a replica")
    answer_timeout: float = positive(660.0, "maximum seconds between two bytes of a replica's answer")
    stats_period: float = positive(1.0, "seconds between two reports of a replica's load and health")

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise contradiction("max_replicas", "it is less than num_replicas; raise it or lower that.")
        if bool(self.prefill) != bool(self.decode):
            missing, other = ("decode", "prefill") if self.prefill else ("prefill", "decode")
            raise contradiction(missing, f"{other} instances cannot answer alone; give --{missing} too.")
        if self.prefill and (wrong := self.model_fields_set & {"num_replicas", "max_replicas"}):
            raise contradiction(min(wrong), "prefill and decode are the numbers of replicas; leave it out.")
        return self

    @property
    def count(self) -> int:
        """Replicas at the start."""
        return self.prefill + self.decode if self.prefill and self.decode else self.num_replicas


@dataclass(frozen=True)
class RayApp:
    """What to serve on Ray."""

    model: str
    config: RayConfig
    server: ServerConfig
    options: Mapping[str, Any] = field(repr=False)
    """Settings of each replica's `specdec serve`, by field; may contain keys."""
    secret: str | None = field(default=None, repr=False)
    """Shared by prefill and decode instances; None without them."""

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the replicas."""
        return is_local(self.server.host)

    @classmethod
    def read(cls, args: argparse.Namespace) -> Self:
        """Build it from parsed options; a model that is missing or incomplete raises."""
        config, server = settings_from(args, RayConfig), settings_from(args, ServerConfig)
        engine = settings_from(args, EngineConfig)
        if wrong := sorted(NOT_SERVED & server.model_fields_set):
            raise contradiction(wrong[0], "replicas on Ray do not take it; leave it out.")
        if not config.prefill and (wrong := sorted(n for n in server.model_fields_set if "reach_" in n)):
            raise contradiction(wrong[0], "only prefill and decode instances have it; give --prefill too.")
        if config.prefill and not is_local(server.host) and not server.reach_peers:
            raise contradiction("reach_peers", "give the network of the nodes, such as 10.0.0.0/8.")
        find_models(args.model, engine)
        given = {**server.model_dump(exclude_unset=True), **engine.model_dump(exclude_unset=True)}
        options = {name: value for name, value in given.items() if name not in ("host", "port")}
        model = os.path.abspath(args.model) if os.path.exists(args.model) else args.model
        secret = (os.environ.get(SECRET) or secrets.token_hex(32)) if config.prefill else None
        return cls(model, config, server, options, secret)

    def options_of(self, role: str | None, rank: int, host: str) -> dict[str, Any]:
        """Return the settings of one replica's process.

        Prefill instances listen for decode instances at `reach_port` plus their rank: all know the ports.
        """
        if role is None:
            return dict(self.options)
        port = self.server.reach_port
        peers = ",".join(self.server.reach_peers or ["127.0.0.1"]).split(",")
        ports = range(port, port + (self.config.prefill or 0))
        own = {"role": role, "reach_host": host, "reach_port": port + rank if role == PREFILL else 0}
        return {**self.options, **own, "reach_peers": [f"[{own}]:{each}" for own in peers for each in ports]}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Build it from a mapping of options, as in `serve run` and a file for `serve deploy`."""
        args = argparse.Namespace()
        fill_from(args, given, RayConfig, ServerConfig, EngineConfig)
        if not hasattr(args, MODEL):
            raise contradiction(MODEL, "give it in args: a folder, OWNER/NAME on the hub, or tiny.")
        return cls.read(args)
