"""Processes of a tensor-parallel group: rank 0 starts the others, which load their shares and serve it.

Run as `python -m specdec.setup.ranks FD`, with a pipe to rank 0.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from specdec.core.executor import LocalExecutor
from specdec.core.parallel.executor import serve
from specdec.core.parallel.group import LeaderGroup, RankGroup, join
from specdec.errors import EngineError, SpecdecError
from specdec.kernels.native.threads import limit_threads
from specdec.kernels.table import load_kernels
from specdec.models import spec
from specdec.models.checkpoint import Checkpoint
from specdec.models.families import open_weights
from specdec.models.network import Network
from specdec.models.shards import ShardedWeights, shard_network
from specdec.setup.settings import Resolved
from specdec.state_slots.arena import Arena

START_S = 120.0
"""Seconds for a process to import torch, on a busy machine."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """What a rank needs to load its share."""

    folder: Path
    network: spec.NetworkSpec
    """The whole network."""
    settings: Resolved
    rank: int
    store: Path
    threads: int


def start_ranks(folder: Path, network: spec.NetworkSpec, settings: Resolved) -> LeaderGroup:
    """Start the other ranks, which load their shares while rank 0 loads its own."""
    ranks = settings.config.tp
    threads = max(torch.get_num_threads() // ranks, 1)
    limit_threads(threads)
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="specdec-tp-") as meeting:
        try:
            for _ in range(1, ranks):
                ours, theirs = Pipe()
                connections.append(ours)
                with theirs:
                    processes.append(_start(theirs))
            for rank, connection in enumerate(connections, 1):
                _receive(connection, rank, START_S)
            for rank, connection in enumerate(connections, 1):  # all have started, so they meet soon
                job = RankJob(folder, network, settings, rank, Path(meeting) / "store", threads)
                connection.send(job)
            group = LeaderGroup(join(Path(meeting) / "store", 0, ranks), processes, connections)
            for rank, connection in enumerate(connections, 1):  # others may still read the store
                _receive(connection, rank, START_S)
        except BaseException:
            for process in processes:
                process.kill()
                process.wait()
            raise
    return group


def wait_for_ranks(group: LeaderGroup) -> None:
    """Block until every rank has loaded its share; the end of any is noticed at once."""
    pending = dict(zip(group.connections, range(1, group.ranks), strict=True))
    while pending:
        for connection in [ready for ready in wait([*pending]) if isinstance(ready, Connection)]:
            _receive(connection, pending.pop(connection), START_S)


def _start(pipe: Connection) -> subprocess.Popen[bytes]:
    # The same module path: `-m` would add the current folder, which may be a checkpoint's, whose code is not
    # run. Its own session, so that Ctrl-C does not reach it.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "specdec.setup.ranks", str(pipe.fileno())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.DEVNULL,
        pass_fds=[pipe.fileno()],
        start_new_session=True,
    )


def _receive(connection: Connection, rank: int, limit_s: float) -> None:
    """Wait for a rank's next report, and raise its error if it sends one."""
    if not connection.poll(limit_s):
        raise EngineError(
            f"tp: rank {rank} was not ready within {limit_s:g} s; check the load of the machine."
        )
    try:
        error = connection.recv()
    except EOFError:
        raise EngineError(
            f"tp: rank {rank} ended while it started; see the log above, and free memory."
        ) from None
    if error is not None:
        raise error


def main() -> None:
    """Load a rank's share, and serve rank 0 until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    with Connection(int(sys.argv[1])) as connection:
        connection.send(None)
        job: RankJob = connection.recv()
        limit_threads(job.threads)
        group = RankGroup(join(job.store, job.rank, job.settings.config.tp), job.rank, job.settings.config.tp)
        connection.send(None)
        try:
            executor = load(job, group)
        except SpecdecError as error:
            connection.send(error)
            return
        connection.send(None)
        # A supervisor may send it to all processes, but rank 0 first finishes running requests.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        serve(executor, group, connection)


def load(job: RankJob, group: RankGroup) -> LocalExecutor:
    """Load a rank's share of the weights, and allocate its arena."""
    settings = job.settings
    weights = open_weights(
        Checkpoint(job.folder), job.network, dtype=settings.dtype, device=settings.device, progress=False
    )
    network, cuts = shard_network(job.network, group.ranks)
    loaded = Network(
        network,
        ShardedWeights(weights, cuts, group),
        load_kernels(settings.kernels),
        max_length=settings.max_model_len,
        device=settings.device,
        shard=group,
    )
    weights.finish()
    arena = Arena(settings.layout, settings.memory_bytes, settings.device)
    return LocalExecutor(loaded, arena, settings.device)


if __name__ == "__main__":
    main()
    os._exit(0)  # unloading torch takes seconds
