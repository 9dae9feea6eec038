"""Peers that are processes: they can be stopped, killed and started anew."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from specdec.reach.nixl import Nixl
from tests.reach.pairs import WholeSlots, arena, num_bytes, pick

LONG_S = 120.0


class Child:
    """A process with a carrier of its own."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        """Wait for what the process says first."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(LONG_S)
        self.said = self._pipe.recv()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join()
        self._pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            os.kill(self.process.pid, number)


class Peer(Child):
    """Lets others read an arena of random bytes."""

    def __init__(self, *, seed: int, slabs: int) -> None:
        super().__init__(_lend, seed, slabs)
        self.metadata, self.base = self.said


class Puller(Child):
    """Reads all of a peer again and again."""

    def __init__(self, peer: Peer, *, slabs: int) -> None:
        super().__init__(_pull, peer.metadata, peer.base, slabs)


def _pull(pipe: Connection, metadata: bytes, base: int, slabs: int) -> None:
    torch.set_num_threads(1)
    memory = arena(slabs=slabs)
    carrier = Nixl(memory)
    carrier.attach("P", metadata, WholeSlots.between(memory, base))
    blocks = list(range(4 * slabs))
    size = num_bytes(memory, len(blocks))
    carrier.read("P", pick(memory, blocks, blocks), size, LONG_S).done.result()
    pipe.send("reading")
    while True:
        carrier.read("P", pick(memory, blocks, blocks), size, LONG_S).done.result()


def _lend(pipe: Connection, seed: int, slabs: int) -> None:
    torch.set_num_threads(1)
    memory = arena(seed=seed, slabs=slabs)
    carrier = Nixl(memory)
    pipe.send((carrier.metadata, memory.data.data_ptr()))
    pipe.poll(None)  # until the test lets go
    carrier.close()
