"""Settings of `specdec ray`: placement, scaling, and the ingress. `specdec serve` has its own."""

import argparse
import os
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

NOT_SERVED = frozenset({"ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "role"}) | {
    name for name in ServerConfig.model_fields if name.startswith("reach_")
}
"""Settings of `specdec serve` that replicas on Ray cannot have: Ray's proxy speaks HTTP to clients."""


class RayConfig(Settings):
    """Replicas on Ray, and how the ingress chooses among them."""

    num_replicas: int = integer(1, "replicas; the minimum if max_replicas is set")
    max_replicas: int | None = integer(None, "maximum replicas, added under load. None: num_replicas")
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
        return self


@dataclass(frozen=True)
class RayApp:
    """What to serve on Ray."""

    model: str
    config: RayConfig
    server: ServerConfig
    options: Mapping[str, Any] = field(repr=False)
    """Settings of each replica's `specdec serve`, by field; may contain keys."""

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
        find_models(args.model, engine)
        given = {**server.model_dump(exclude_unset=True), **engine.model_dump(exclude_unset=True)}
        options = {name: value for name, value in given.items() if name not in ("host", "port")}
        model = os.path.abspath(args.model) if os.path.exists(args.model) else args.model
        return cls(model, config, server, options)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Build it from a mapping of options, as in `serve run` and a file for `serve deploy`."""
        args = argparse.Namespace()
        fill_from(args, given, RayConfig, ServerConfig, EngineConfig)
        if not hasattr(args, MODEL):
            raise contradiction(MODEL, "give it in args: a folder, OWNER/NAME on the hub, or tiny.")
        return cls.read(args)
