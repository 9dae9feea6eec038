"""`specdec serve` in separate processes, each on one core with one thread."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, EngineError

STARTING_S, STOPPING_S, POLL_S = 180.0, 60.0, 0.05
LOG_TAIL = 600
"""Characters of a server's log that an error message quotes."""
SERVERS_OWN = frozenset({"SPECDEC_REACH_SECRET", "SPECDEC_API_KEY"})
"""Variables that configure a server: the user may have set them for other servers."""
ADDRESS = re.compile(r"(https?://\S+?)/v1")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server process, which runs until `running` exits."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")


@contextmanager
def running(
    model: str, settings: Mapping[str, Any], *, core: int | None, environment: Mapping[str, str]
) -> Iterator[ServerProcess]:
    """Start a server on one core, wait until it listens, and stop it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "settings.yaml", Path(folder) / "log"
        file.write_text(json.dumps({"port": 0, **settings}), "utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "specdec", "serve", model, "--config", str(file)]
        with log.open("wb") as out, on_core(core):
            process = subprocess.Popen(
                command,
                env=surroundings(environment, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            yield ServerProcess(_address(process, log), process, log)
        finally:
            _stop(process)


def surroundings(environment: Mapping[str, str], around: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without variables that give a server a role or a key."""
    kept = {name: value for name, value in around.items() if name not in SERVERS_OWN}
    return {**kept, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **environment}


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin processes started in the block to one core; children inherit the affinity."""
    before = os.sched_getaffinity(0) if core is not None else None
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait for the server to log its address, and return it."""
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := ADDRESS.search(log.read_text("utf-8", "replace")):
            return found[1]
        time.sleep(POLL_S)
    said = log.read_text("utf-8", "replace")[-LOG_TAIL:]
    raise EngineError(f"an engine of the benchmark did not start; it said: …{said}", field="model")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOPPING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def two_cores(wanted: Sequence[int] | None) -> tuple[int, int] | None:
    """Return the cores of two concurrent engines; None if the system has no CPU affinity."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    own = sorted(os.sched_getaffinity(0))
    first, second = wanted or [*own, *own][:2]
    if strange := {first, second} - {*own}:
        raise ConfigError(
            f"cores: this process may not use {min(strange)}; name two of {', '.join(map(str, own))}",
            field="cores",
        )
    return first, second
