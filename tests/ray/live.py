"""`specdec ray` in a separate process, and the `specdec serve` processes of its replicas."""

import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.server.live import Live

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra `ray` brings it"
)
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


class LiveRay(Live):
    """A running `specdec ray`, ended on exit from the context."""

    def __init__(self, *options: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(*options, env=env, is_fresh=True)
        command = ("ray", "tiny", "--port", "0", "--num-cpus", "0.5", *options)
        self.command = [sys.executable, "-m", "specdec.cli", *command]

    def replicas(self) -> dict[int, str]:
        """Return the URL of each replica's process, by process id."""
        found = {pid: _url(pid) for pid in _descendants(self.process.pid) if "serve" in _words(pid)}
        return {pid: url for pid, url in found.items() if url}

    def wait(self, replicas: int) -> dict[int, str]:
        """Wait until that many replicas listen."""
        for _ in range(1200):
            if len(found := self.replicas()) == replicas:
                return found
            time.sleep(0.1)
        raise AssertionError("".join(self.said))


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8").split("\0")
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text("utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for own in found:
        found += parents.get(own, [])
    return found


def _url(pid: int) -> str | None:
    """Return where a process listens first: a server binds its port before those of P/D."""
    try:
        links = {int(path.name): os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text("utf-8").splitlines()[1:]]
    except OSError:
        return None
    ports = {f"socket:[{own[9]}]": int(own[1].partition(":")[2], 16) for own in lines if own[3] == LISTENS}
    found = (ports[links[fd]] for fd in sorted(links) if links[fd] in ports)
    return f"http://127.0.0.1:{port}" if (port := next(found, None)) else None
