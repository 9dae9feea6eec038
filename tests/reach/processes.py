"""Peers that are processes: they can be stopped, killed and started anew."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

import torch

from specdec.reach.nixl import Nixl
from tests.reach.pairs import arena

LONG_S = 120.0


class Peer:
    """A process that lets others read an arena of random bytes."""

    def __init__(self, *, seed: int, slabs: int) -> None:
        """Wait until it can be read."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_lend, args=(theirs, seed, slabs), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(LONG_S)
        self.metadata, self.base = self._pipe.recv()

    def stop(self) -> None:
        """Return once all threads have stopped: the signal alone lets them go on for a moment."""
        self._signal(signal.SIGSTOP)
        if self.process.exitcode is None and self.process.pid is not None:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join()
        self._pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)


def _lend(pipe: Connection, seed: int, slabs: int) -> None:
    torch.set_num_threads(1)
    memory = arena(seed=seed, slabs=slabs)
    carrier = Nixl(memory)
    pipe.send((carrier.metadata, memory.data.data_ptr()))
    pipe.poll(None)  # until the test lets go
    carrier.close()
