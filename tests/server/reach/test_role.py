"""Settings that make a server lend and fetch, and settings that conflict with them."""

import importlib.util
import socket
from typing import Any

import pytest

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError
from specdec.reach.protocol import VARIABLE, ReachError
from specdec.server import run
from specdec.server.listen import bind
from specdec.server.reach.role import allowed_peers, resolve_role
from specdec.server.settings import ServerConfig

SECRET = {VARIABLE: "0123456789abcdef"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("nixl_cu12", "cryptography"))


def role(environment: dict[str, str] = SECRET, models: int = 1, **settings: Any) -> str | None:
    engine = {name: settings.pop(name) for name in ("prefix_cache",) if name in settings}
    part = resolve_role(ServerConfig(**settings), EngineConfig(**engine), models, environment)
    return part.role if part else None


def test_with_a_secret_the_default_role_is_both() -> None:
    assert role({}) is None
    assert role() == "both"
    assert role(role="prefill") == "prefill" and role(role="decode") == "decode"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"environment": {}, "role": "prefill"}, "role"),
        ({"environment": {VARIABLE: "short"}}, VARIABLE),
        ({"environment": {VARIABLE: ""}}, VARIABLE),
        ({"environment": {}, "reach_peers": ["10.0.0.0/8"]}, "reach_peers"),
        ({"environment": {}, "reach_port": 5601}, "reach_port"),
        ({"models": 2}, "model"),
        ({"keep_alive": 60.0}, "keep_alive"),
        ({"weights_bytes": "1GiB"}, "weights_bytes"),
        ({"arenas": 1}, "arenas"),
        ({"prefix_cache": False}, "prefix_cache"),
        ({"port": 8001, "reach_port": 8001}, "reach_port"),
        ({"port": 5600}, "reach_port"),
        ({"reach_peers": ["10.0.0.1/8"]}, "reach_peers"),
        ({"reach_peers": ["x:70000"]}, "reach_peers"),
        ({"reach_host": "0.0.0.0"}, "reach_host"),
        ({"reach_host": "::"}, "reach_host"),
        ({"reach_host": "http://x"}, "reach_host"),
        ({"role": "writer"}, "role"),
        ({"reach_lease_max": 0.0}, "reach_lease_max"),
    ],
)
def test_contradictory_settings_are_refused_by_name_at_startup(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        role(**given)
    assert caught.value.field == field and field in str(caught.value)


@pytest.mark.parametrize("installed", ["", "nixl_cu12", "cryptography"])
def test_a_carrier_that_is_not_installed_is_refused(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == installed)
    with pytest.raises(ConfigError, match=r"specdec\[reach\]") as caught:
        role()
    assert caught.value.field == "role"
    assert role({}) is None


@pytest.mark.parametrize("refused", [{"prefix_cache": False}, {"models": 2}, {"keep_alive": 1.0}, {}])
def test_the_way_out_leads_to_no_other_refusal(
    refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not refused:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="leave role out and unset"):
        role(role="prefill", **refused)
    with pytest.raises(ConfigError, match=f", or unset {VARIABLE}"):
        role(**refused)


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost.", "0.0.0.0"])
def test_other_loopback_ports_are_no_peers_by_default(host: str) -> None:
    """Any local user may listen there, and clients choose the address that requests are sent to."""
    for port in (5600, 5601):
        allowed = allowed_peers(ServerConfig(reach_port=5601))
        assert str(allowed.endpoint("localhost", port)) == f"127.0.0.1:{port}", "the control"
        with pytest.raises(ReachError):
            allowed.endpoint(host, port)


def test_no_message_repeats_the_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        role({VARIABLE: "a secret with spaces"})
    assert "a secret with spaces" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"max_queued": 3}, {"served_model_name": ["x"]}, {"port": 0, "reach_port": 0}]
)
def test_other_settings_go_with_a_role(settings: dict[str, Any]) -> None:
    assert role(**settings) == "both"


def test_a_side_channel_that_cannot_listen_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET[VARIABLE])

    def loads(*_: Any) -> Any:
        raise AssertionError("nothing is to be loaded")

    monkeypatch.setattr(run, "open_models", loads)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for field, own in (("reach_port", {"reach_port": port}), ("reach_host", {"reach_host": "192.0.2.1"})):
            with bind("127.0.0.1", 0) as sock, pytest.raises(ConfigError, match=f"^{field}: ") as caught:
                run.run([], EngineConfig(), ServerConfig(role="prefill", **own), sock)
            assert caught.value.field == field


def test_a_port_in_use_is_named_with_its_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port: port {port} is in use .*`--port N`.*stop the server"):
            bind("127.0.0.1", port)
