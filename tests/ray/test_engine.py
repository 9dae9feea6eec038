"""The Engine deployment's class without Ray: it owns one `specdec serve` process."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.errors import SpecdecError
from specdec.ray.engine import EngineFailed, ServerProcess
from specdec.ray.figures import Figures
from specdec.ray.settings import DECODE, NOT_SERVED, PREFILL, SECRET, RayApp, RayConfig
from specdec.reach.allowed_peers import AllowedPeers
from tests.selection import EXHAUSTIVE

ROOT = Path(__file__).parents[2]


@EXHAUSTIVE
def test_a_process_reports_its_load_and_its_end() -> None:
    async def run() -> None:
        server = await ServerProcess.start(RayApp.of({"model": "tiny", "api_key": ["k"]}), "127.0.0.1")
        await server.check()
        assert server.url.startswith("http://127.0.0.1:")
        assert (await server.figures()) == Figures()
        os.kill(server.process.pid, signal.SIGKILL)
        await server.process.wait()
        with pytest.raises(EngineFailed, match="ended with code -9"):
            await server.check()
        await server.stop()

    asyncio.run(run())


@EXHAUSTIVE
def test_a_process_that_does_not_start_says_why() -> None:
    async def run() -> None:
        app = RayApp.of({"model": "tiny", "max_model_len": 1 << 30})
        with pytest.raises(EngineFailed, match=r"max.model.len"):
            await ServerProcess.start(app, "127.0.0.1")

    asyncio.run(run())


def test_options_may_come_from_a_mapping() -> None:
    app = RayApp.of(
        {"model": "tiny", "num-replicas": "2", "max-running": 4, "api-key": "k", "host": "0.0.0.0"}
    )
    assert app.config.num_replicas == 2 and not app.is_local
    assert app.options == {"max_running": 4, "api_key": ["k"]}
    assert "'k'" not in repr(app), "keys are not logged"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "model: give it"),
        ({"model": "nonesuch"}, "nonesuch is neither"),
        ({"model": "tiny", "replicas": 2}, "did you mean --num-replicas|num-replicas"),
        ({"model": "tiny", "max_replicas": 1, "num_replicas": 2}, "max_replicas: it is less"),
        ({"model": "tiny", "ssl-certfile": "x"}, "ssl_certfile: replicas on Ray do not take it"),
        ({"model": "tiny", "prefill": 1}, "decode: prefill instances cannot answer alone"),
        ({"model": "tiny", "decode": 1}, "prefill: decode instances cannot answer alone"),
        (
            {"model": "tiny", "prefill": 1, "decode": 1, "num_replicas": 2},
            "num_replicas: prefill and decode are",
        ),
        ({"model": "tiny", "reach_port": 5601}, "reach_port: only prefill and decode instances have it"),
        ({"model": "tiny", "prefill": 1, "decode": 1, "host": "0.0.0.0"}, "reach_peers: give the network"),
    ],
)
def test_what_is_wrong_in_a_mapping_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecdecError, match=says):
        RayApp.of(given)


def test_decode_instances_know_the_port_of_each_prefill_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    app = RayApp.of({"model": "tiny", "prefill": 2, "decode": 1, "seed": 3})
    assert app.config.count == 3 and len(app.secret or "") == 64 and app.secret not in repr(app)
    peers = ["[127.0.0.1]:5600", "[127.0.0.1]:5601"]
    own = {"seed": 3, "reach_host": "127.0.0.1", "reach_peers": peers}
    assert app.options_of(PREFILL, 1, "127.0.0.1") == {**own, "role": "prefill", "reach_port": 5601}
    assert app.options_of(DECODE, 0, "127.0.0.1") == {**own, "role": "decode", "reach_port": 0}
    given = {"host": "0.0.0.0", "reach_peers": ["10.0.0.0/8,p.example"], "reach_port": 7000}
    monkeypatch.setenv(SECRET, "shared by a cluster")
    cluster = RayApp.of({"model": "tiny", "prefill": 1, "decode": 1, **given})
    found = cluster.options_of(DECODE, 0, "10.0.0.7")
    assert found["reach_peers"] == ["[10.0.0.0/8]:7000", "[p.example]:7000"]
    assert AllowedPeers(found["reach_peers"], 5600).endpoint("10.1.2.3", 7000)
    assert cluster.secret == "shared by a cluster"
    assert RayApp.of({"model": "tiny"}).secret is None, "plain replicas lend nothing"


def test_the_file_for_serve_deploy_fits() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray.yaml").read_text("utf-8"))["applications"]
    assert application["import_path"] == "specdec.ray:app"
    assert RayApp.of(application["args"]).config.num_replicas == 2


def test_settings_that_ray_cannot_serve_are_none_of_its_own() -> None:
    assert not NOT_SERVED & RayConfig.model_fields.keys()
