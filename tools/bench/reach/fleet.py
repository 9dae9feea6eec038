"""The engines to compare: a disaggregated pair, and two standalone ones."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from specdec.config.engine import EngineConfig
from tools.bench.options import ReachOptions
from tools.bench.reach.routes import BenchRoute, BootstrapRoomRoute, ProxiedRoute, StandaloneRoute
from tools.bench.reach.servers import free_port, running, two_cores

MEMORY_BYTES = 512 << 20
"""Default memory of each engine: four have to fit."""


@dataclass(frozen=True, slots=True)
class EngineFleet:
    """Routes through running engines; engines that work concurrently have a core each."""

    one: BenchRoute
    """One standalone engine, on the decode instance's core."""
    two: BenchRoute
    """Two standalone engines, in turn."""
    apart: tuple[BenchRoute, ...]
    """A prefill and a decode instance."""
    cores: tuple[int, int] | None


@contextmanager
def started(options: ReachOptions, config: EngineConfig) -> Iterator[EngineFleet]:
    """Start four engines, and stop them at the end."""
    cores, port = two_cores(options.cores), free_port()
    settings = {"memory_bytes": MEMORY_BYTES, **config.model_dump(mode="json", exclude_unset=True)}
    # Transfers that shared memory cannot carry use the loopback device.
    secret = {"SPECDEC_REACH_SECRET": secrets.token_hex(16), "UCX_NET_DEVICES": "lo"}
    parts: tuple[tuple[int, dict[str, Any], dict[str, str]], ...] = (
        (0, {"role": "prefill", "reach_port": port}, secret),
        (1, {"role": "decode", "reach_port": 0, "reach_peers": [f"127.0.0.1:{port}"]}, secret),
        (0, {}, {}),
        (1, {}, {}),
    )
    with ExitStack() as processes:
        urls = []
        for place, own, environment in parts:
            core = cores[place] if cores else None
            server = running(options.model, {**settings, **own}, core=core, environment=environment)
            urls.append(processes.enter_context(server).url)
        prefill, decode, first, second = urls
        yield EngineFleet(
            one=StandaloneRoute("one engine", second),
            two=StandaloneRoute("two engines in turn", first, second),
            apart=(ProxiedRoute(prefill, decode), BootstrapRoomRoute(prefill, decode, port)),
            cores=cores,
        )
