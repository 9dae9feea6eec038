"""The engines that are compared: two that share the work of one request, and two that do not."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from specdec.bench.options import ReachOptions
from specdec.bench.reach.servers import free_port, running, two_cores
from specdec.bench.reach.ways import Plain, Proxied, Rooms, Way
from specdec.config.engine import EngineConfig

MEMORY_BYTES = 512 << 20
"""Of each engine where its settings do not say: four have to fit."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ways through engines that run; of each two that work at a time, each has a core of its own."""

    one: Way
    """One engine that reads and writes, on the core of the one that writes alone."""
    two: Way
    """Two of these, in turn."""
    apart: tuple[Way, ...]
    """One that reads and one that writes."""
    cores: tuple[int, int] | None


@contextmanager
def started(options: ReachOptions, config: EngineConfig) -> Iterator[Fleet]:
    """Start four engines, and stop them in the end."""
    cores, port = two_cores(options.cores), free_port()
    settings = {"memory_bytes": MEMORY_BYTES, **config.model_dump(mode="json", exclude_unset=True)}
    # What one machine's memory does not carry goes by its loopback.
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
        yield Fleet(
            one=Plain("one engine", second),
            two=Plain("two engines in turn", first, second),
            apart=(Proxied(prefill, decode), Rooms(prefill, decode, port)),
            cores=cores,
        )
