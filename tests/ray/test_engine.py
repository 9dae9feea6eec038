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
from specdec.ray.settings import NOT_SERVED, RayApp, RayConfig
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
    ],
)
def test_what_is_wrong_in_a_mapping_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecdecError, match=says):
        RayApp.of(given)


def test_the_file_for_serve_deploy_fits() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy" / "ray.yaml").read_text("utf-8"))["applications"]
    assert application["import_path"] == "specdec.ray:app"
    assert RayApp.of(application["args"]).config.num_replicas == 2


def test_settings_that_ray_cannot_serve_are_none_of_its_own() -> None:
    assert not NOT_SERVED & RayConfig.model_fields.keys()
