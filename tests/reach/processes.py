"""Peers in processes that can be stopped, killed and restarted."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specdec.reach.nixl import Nixl
from tests.reach.pairs import arena

LONG_S = 120.0


class Peer:
    """A process that lets others read an arena of random bytes."""

    def __init__(self, *, seed: int, slabs: int) -> None:
        """Start the process, and wait until its arena can be read."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_lend, args=(theirs, seed, slabs), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(LONG_S)
        self.metadata, self.base = self._pipe.recv()

    def stop(self) -> None:
        """Stop the process; return once all threads have stopped, which lags behind the signal."""
        self._signal(signal.SIGSTOP)
        assert self.process.pid is not None
        until_s = time.monotonic() + LONG_S
        while not _is_stopped(self.process.pid):
            assert self.process.exitcode is None and time.monotonic() < until_s
            time.sleep(0.001)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join()
        self._pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)


def _is_stopped(pid: int) -> bool:
    """Return whether every thread of a process is in the stopped state."""
    try:
        stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:  # a thread, or the process, has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def _lend(pipe: Connection, seed: int, slabs: int) -> None:
    torch.set_num_threads(1)
    memory = arena(seed=seed, slabs=slabs)
    carrier = Nixl(memory)
    pipe.send((carrier.metadata, memory.data.data_ptr()))
    pipe.poll(None)  # until the test closes the pipe
    carrier.close()
