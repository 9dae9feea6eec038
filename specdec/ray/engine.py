"""Engine deployment: a replica runs one `specdec serve` process on a free port of its node."""

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from specdec.ray.figures import Figures, read_figures
from specdec.ray.scale import wanted_share
from specdec.ray.settings import RayApp

logger = logging.getLogger(__name__)

URL = re.compile(r"https?://\S+?(?=/v1\b)")
"""Where `specdec serve` prints its address."""
KILL_S = 5.0
"""Seconds beyond drain_seconds until a process that does not stop is killed."""
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class EngineFailed(RuntimeError):
    """The process ended, or does not answer."""


class Engine:
    """Placed, watched and counted by Ray; requests go to its process directly."""

    async def __init__(self, app: RayApp) -> None:  # type: ignore[misc]
        self._app, self._key = app, _key_of(app.options)
        host = "127.0.0.1" if app.is_local else _node_address()
        self._process, self._url, self._log = await _start(app, host)
        self._reading = asyncio.create_task(self._read_log())
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else None,
            timeout=aiohttp.ClientTimeout(total=app.server.step_timeout),
        )

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the address for the ingress."""
        return {"url": self._url}

    async def check_health(self) -> None:
        """Raise if the process has ended or its server fails, so that Ray replaces the replica."""
        if self._process.returncode is not None:
            raise EngineFailed(f"specdec serve ended with code {self._process.returncode}: {self._last()}")
        async with self._session.get(f"{self._url}/health") as answer:
            if answer.status != 200:
                raise EngineFailed(f"{self._url}/health answers {answer.status}")

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the load, for the choice of a replica."""
        figures = await self._figures()
        return {"waiting": figures.waiting, "arena": figures.arena}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the memory that requests want, for `specdec.ray.scale`."""
        figures = await self._figures()
        return {"wanted_share": wanted_share(figures.arena, figures.running, figures.waiting)}

    async def _figures(self) -> Figures:
        async with self._session.get(f"{self._url}/metrics") as answer:
            return read_figures(await answer.read() if answer.status == 200 else b"")

    async def _read_log(self) -> None:
        """Copy the process's output to this replica's log; an unread pipe would block it."""
        assert self._process.stdout
        async for line in self._process.stdout:
            self._log.append(line.decode(errors="replace").rstrip())
            print(self._log[-1], flush=True)

    def _last(self) -> str:
        return self._log[-1] if self._log else "it printed nothing"

    async def __del__(self) -> None:
        """Drain and stop the process. Ray calls it once no request holds the replica."""
        if not hasattr(self, "_session"):
            return
        await self._session.close()
        await _stop(self._process, self._app.server.drain_seconds + KILL_S)
        await self._reading


async def _start(app: RayApp, host: str) -> tuple[Process, str, deque[str]]:
    """Start `specdec serve`; return it with its address and the output so far."""
    log: deque[str] = deque(maxlen=20)
    paths = os.pathsep.join(path for path in sys.path if path)  # Ray extends it, for clones for example
    with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
        config = Path(folder) / "specdec.yaml"  # keys must not show in the list of processes
        config.write_text(yaml.safe_dump({name.replace("_", "-"): own for name, own in app.options.items()}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specdec", "serve", app.model),
            *("--host", host, "--port", "0", "--config", str(config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, "PYTHONPATH": paths},
            preexec_fn=_end_with_parent,
        )
        try:
            assert process.stdout
            async for line in process.stdout:
                log.append(line.decode(errors="replace").rstrip())
                print(log[-1], flush=True)
                if found := URL.search(log[-1]):
                    return process, found[0], log
            await process.wait()
        except BaseException:
            await _stop(process, 0)
            raise
    raise EngineFailed(log[-1] if log else f"specdec serve ended with code {process.returncode}")


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent, which Ray may kill."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


async def _stop(process: Process, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
                return
        process.kill()
        await process.wait()


def _key_of(options: Mapping[str, Any]) -> str | None:
    """Return a key of the server, for its figures."""
    given = [*(options.get("api_key") or ()), os.environ.get("SPECDEC_API_KEY", "")]
    if path := options.get("api_key_file"):
        lines = Path(path).read_text("utf-8").splitlines()
        given += [line for line in lines if not line.lstrip().startswith("#")]
    return next((own.split()[0] for own in given if own.strip()), None)


def _node_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())
