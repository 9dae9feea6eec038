"""A server's part in disaggregated prefill, resolved at its start."""

import importlib.util
import os
from collections.abc import Mapping
from typing import NamedTuple

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.protocol import SHORTEST_SECRET, VARIABLE, Secret
from specdec.server.settings import Role, ServerConfig

NIXL = ("nixl_cu12", "nixl_cu13")
"""Packages, one of which is required."""
USUAL_PORT = ServerConfig.model_fields["reach_port"].default
LOOPBACK = "127.0.0.1"
"""Default address of side channels. Any user of the machine may listen on other loopback addresses, and could
relay requests sent there."""


class ServerRole(NamedTuple):
    """A server's role, the shared secret, and the peers it may fetch from."""

    role: Role
    secret: Secret
    allowed: AllowedPeers


def resolve_role(
    config: ServerConfig, engine: EngineConfig, models: int, environment: Mapping[str, str] = os.environ
) -> ServerRole | None:
    """Return a server's part, or None; raise for incompatible settings before anything is loaded."""
    secret = Secret.read(environment)
    if secret is None:
        if config.role is None:
            _check_nothing_given(config)
            return None
        raise ConfigError(
            f"role: {config.role} needs a secret shared by all servers that lend and fetch prompts; set "
            f"{VARIABLE} in the environment to one of at least {SHORTEST_SECRET} characters, or leave role "
            "out.",
            field="role",
        )
    _check_one_model(config, models)
    if not engine.prefix_cache:
        raise ConfigError(
            "prefix_cache: lending and fetching need cached prefixes; leave prefix caching on, or "
            f"{_without(config)}.",
            field="prefix_cache",
        )
    if engine.tp > 1:
        raise ConfigError(
            f"tp: prompts are lent and fetched with one rank only; use tp=1, or {_without(config)}.",
            field="tp",
        )
    if config.reach_port == config.port != 0:
        raise ConfigError(
            f"reach_port: port {config.port} is the API's; choose another one for the side channel with "
            "`--reach-port N`.",
            field="reach_port",
        )
    is_installed = importlib.util.find_spec
    if not (any(map(is_installed, NIXL)) and is_installed("cryptography")):
        raise ConfigError(
            "role: NIXL or cryptography is not installed; pip install 'specdec[reach]', or "
            f"{_without(config)}.",
            field="role",
        )
    return ServerRole(config.role or "both", secret, allowed_peers(config))


def allowed_peers(config: ServerConfig) -> AllowedPeers:
    """Return the peers to fetch from; by default this machine, at the default port or this one's."""
    peers = config.reach_peers
    if peers is None:
        peers = [LOOPBACK, f"{LOOPBACK}:{USUAL_PORT}"]
    return AllowedPeers(peers, config.reach_port)


def _check_one_model(config: ServerConfig, models: int) -> None:
    """Raise for settings that would move or free memory that other servers read."""
    for field, is_set in (
        ("model", models > 1),
        ("arenas", config.arenas is not None),
        ("weights_bytes", config.weights_bytes is not None),
        ("keep_alive", config.keep_alive >= 0),
    ):
        if is_set:
            raise ConfigError(
                f"{field}: a server with a role has one model, always loaded, as others read its "
                f"memory; {'give one' if field == 'model' else 'leave it out'}, or "
                f"{_without(config)}.",
                field=field,
            )


def _check_nothing_given(config: ServerConfig) -> None:
    """Raise for side channel settings without a secret, which was probably forgotten."""
    for field in sorted(config.model_fields_set):
        if field.startswith("reach_") and getattr(config, field) is not None:
            raise ConfigError(
                f"{field}: without a secret nothing is lent or fetched; set {VARIABLE} in the environment to "
                f"one of at least {SHORTEST_SECRET} characters, or leave {field} out.",
                field=field,
            )


def _without(config: ServerConfig) -> str:
    """Return how to start a server without a part."""
    return f"unset {VARIABLE}" if config.role is None else f"leave role out and unset {VARIABLE}"
