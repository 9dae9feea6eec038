"""Engine deployment: a replica runs one `specdec serve` process on a free port of its node."""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from specdec.ray.figures import Figures, read_figures
from specdec.ray.scale import wanted_share
from specdec.ray.settings import SECRET, RayApp

URL = re.compile(r"https?://\S+?(?=/v1\b)")
"""Where `specdec serve` prints its address."""
KILL_S = 5.0
"""Seconds beyond drain_seconds until a process that does not stop is killed."""
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class EngineFailed(RuntimeError):
    """The process ended, or does not answer."""


class ServerProcess:
    """A `specdec serve` process on a free port. It ends with this process, whatever ends that."""

    def __init__(self, app: RayApp, process: Process, url: str, log: deque[str]) -> None:
        self.url, self.process = url, process
        self._drain_seconds, self._log = app.server.drain_seconds, log
        self._reading = asyncio.create_task(self._read_log())
        key = _key_of(app.options)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=aiohttp.ClientTimeout(total=app.server.step_timeout),
        )

    @classmethod
    async def start(cls, app: RayApp, host: str, role: str | None = None, rank: int = 0) -> Self:
        """Start it, and wait until it has loaded the model."""
        log: deque[str] = deque(maxlen=20)
        paths = os.pathsep.join(path for path in sys.path if path)  # Ray extends it, for clones for example
        with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
            config = Path(folder) / "specdec.yaml"  # keys must not show in the list of processes
            config.write_text(yaml.safe_dump(app.options_of(role, rank, host)))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "specdec", "serve", app.model),
                *("--host", host, "--port", "0", "--config", str(config)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                env=_environment(app) | {"PYTHONPATH": paths},
                preexec_fn=_end_with_parent,
            )
            assert process.stdout
            try:
                async for line in process.stdout:
                    if found := URL.search(_note(log, line)):
                        return cls(app, process, found[0], log)
                await process.wait()
            except BaseException:
                await _stop(process, 0)
                raise
        raise EngineFailed(log[-1] if log else f"specdec serve ended with code {process.returncode}")

    async def check(self) -> None:
        """Raise if the process has ended or its server fails."""
        if self.process.returncode is not None:
            last = self._log[-1] if self._log else "it printed nothing"
            raise EngineFailed(f"specdec serve ended with code {self.process.returncode}: {last}")
        async with self._session.get(f"{self.url}/health") as answer:
            if answer.status != 200:
                raise EngineFailed(f"{self.url}/health answers {answer.status}")

    async def figures(self) -> Figures:
        """Return its load."""
        async with self._session.get(f"{self.url}/metrics") as answer:
            return read_figures(await answer.read() if answer.status == 200 else b"")

    async def stop(self) -> None:
        """Drain and end it."""
        await self._session.close()
        await _stop(self.process, self._drain_seconds + KILL_S)
        await self._reading

    async def _read_log(self) -> None:
        """Copy its output to this process's; an unread pipe would block it."""
        assert self.process.stdout
        while output := await self.process.stdout.read(READ_BYTES):  # a line may be very long
            _note(self._log, output)


class Engine:
    """Placed, watched and counted by Ray; requests go to its process directly."""

    async def __init__(self, app: RayApp, role: str | None = None) -> None:  # type: ignore[misc]
        from ray import serve

        host = "127.0.0.1" if app.is_local else _node_address()
        rank = serve.get_replica_context().rank.rank
        self._server = await ServerProcess.start(app, host, role, rank)

    def record_replica_metadata(self) -> dict[str, str]:
        """Return the address for the ingress."""
        return {"url": self._server.url}

    async def check_health(self) -> None:
        """Raise if the server failed, so that Ray replaces the replica."""
        await self._server.check()

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the load, for the choice of a replica."""
        figures = await self._server.figures()
        return {"waiting": figures.waiting, "arena": figures.arena}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the memory that requests want, for `specdec.ray.scale`."""
        figures = await self._server.figures()
        return {"wanted_share": wanted_share(figures.arena, figures.running, figures.waiting)}

    async def __del__(self) -> None:
        """Stop the server. Ray awaits this once no request holds the replica."""
        if hasattr(self, "_server"):
            await self._server.stop()


def _note(log: deque[str], output: bytes) -> str:
    """Print output and append its lines to the log; return the last one."""
    text = output.decode(errors="replace")
    print(text, end="", flush=True)
    log.extend(line for line in text.splitlines() if line.strip())
    return log[-1] if log else ""


def _environment(app: RayApp) -> dict[str, str]:
    """Return the environment of a process. Only prefill and decode instances get a secret."""
    own = {name: value for name, value in os.environ.items() if name != SECRET}
    if app.secret:
        own[SECRET] = app.secret
        if app.is_local and not app.config.num_gpus:
            own.setdefault("UCX_NET_DEVICES", "lo")
    return own


def _end_with_parent() -> None:
    """Make the kernel kill this process when its parent dies, which Ray may kill."""
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
