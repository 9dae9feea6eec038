"""What part a server takes in prefill apart from decode: settled at its start, or refused by name."""

import importlib.util
import os
from collections.abc import Mapping

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.server.settings import Role, ServerConfig

VARIABLE = "SPECDEC_REACH_SECRET"
SHORTEST_SECRET = 16
CARRIERS = {"nixl": ("nixl_cu12", "nixl_cu13")}
"""The packages of which a carrier wants one."""


def settle_role(
    config: ServerConfig, engine: EngineConfig, models: int, environ: Mapping[str, str] = os.environ
) -> Role | None:
    """Return the server's role, if it has one; refuse, before anything is loaded, what it cannot go with."""
    secret = environ.get(VARIABLE)
    if secret is None:
        if config.role is None:
            return None
        raise ConfigError(
            f"role: {config.role} needs a secret that all servers share which lend and fetch prompts; set "
            f"{VARIABLE} in the environment to one of at least {SHORTEST_SECRET} characters, or leave role "
            "out.",
            field="role",
        )
    check_secret(secret)
    _check_one_model(config, models)
    if not engine.prefix_cache:
        raise ConfigError(
            f"prefix_cache: what is lent and fetched are cached prefixes; leave it on, or unset {VARIABLE}.",
            field="prefix_cache",
        )
    if not any(importlib.util.find_spec(name) for name in CARRIERS[config.reach_carrier]):
        raise ConfigError(
            f"reach_carrier: {config.reach_carrier} is not installed; pip install 'specdec[reach]', or unset "
            f"{VARIABLE}.",
            field="reach_carrier",
        )
    return config.role or "both"


def read_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret of a server that has a role."""
    return environ[VARIABLE].strip()


def check_secret(secret: str) -> None:
    """Refuse a secret that could be guessed: who knows it may read all prompts that a server holds."""
    if len(secret.strip()) < SHORTEST_SECRET:
        raise ConfigError(
            f"{VARIABLE}: it has fewer than {SHORTEST_SECRET} characters and could be guessed; set a longer "
            "one, such as openssl rand -hex 32 writes, the same for all servers.",
            field=VARIABLE,
        )


def _check_one_model(config: ServerConfig, models: int) -> None:
    """Refuse what would move or free the memory that other servers read."""
    for field, is_set in (
        ("model", models > 1),
        ("arenas", config.arenas is not None),
        ("weights_bytes", config.weights_bytes is not None),
        ("keep_alive", config.keep_alive >= 0),
    ):
        if is_set:
            raise ConfigError(
                f"{field}: other servers read the memory of a server that has a role, so it has one model, "
                f"loaded for good; {'give one' if field == 'model' else 'leave it out'}, or unset "
                f"{VARIABLE}.",
                field=field,
            )
