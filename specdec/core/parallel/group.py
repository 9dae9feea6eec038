"""A tensor-parallel group: its sums and gathers, and rank 0's connections to the other ranks."""

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, distributed

from specdec.core.parallel.commands import Operation, packed
from specdec.errors import EngineError, SpecdecError
from specdec.models.cut import share
from specdec.models.linear import Projection
from specdec.models.shards import Shard
from specdec.state_slots.arena import SlotPair

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # some builds of torch have none

logger = logging.getLogger(__name__)

JOIN_S = 60.0
"""Seconds for all ranks to meet, once their processes run."""
COLLECTIVE_S = 300.0
"""Seconds for the other ranks to join a sum or gather; a rank that has ended is noticed at once."""
END_S = 2.0
"""Seconds for the other ranks to end by themselves, or for the end of one to be noticed."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""
DIGEST_BYTES = 4

Report = Callable[[SpecdecError], None]


def join(store: Path, rank: int, ranks: int) -> "ProcessGroup":
    """Join the group of processes that meet in this file; blocks until all have, for up to `JOIN_S`.

    It is no global group of torch's, so engines share a process, and it listens on the loopback device only.
    """
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=COLLECTIVE_S)
    meeting = distributed.FileStore(str(store), ranks)  # type: ignore[attr-defined]
    meeting.set_timeout(timedelta(seconds=JOIN_S))
    try:
        return cast("ProcessGroup", ProcessGroupGloo(meeting, rank, ranks, options))
    except RuntimeError as error:
        raise EngineError(f"tp: ranks did not meet: {error}; see the log above, and free memory.") from error


class RankGroup(Shard):
    """A rank's communication with its group.

    Every gather carries a digest of the commands and hidden states so far: ranks must agree on each bit.
    """

    def __init__(self, group: "ProcessGroup", rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self._group, self.digest = group, 0

    def observe(self, command: bytes) -> None:
        """Add a command to the digest."""
        self.digest = zlib.crc32(command, self.digest)

    def observe_hidden(self, hidden_TD: Tensor) -> None:
        """Add hidden states to the digest, which sums over all ranks have made equal."""
        bits = int(hidden_TD.contiguous().view(BITS[hidden_TD.dtype.itemsize]).sum(dtype=torch.int64))
        self.digest = zlib.crc32(bits.to_bytes(8, "little", signed=True), self.digest)

    def sum(self, partial_TD: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place if it is contiguous."""
        partial_TD = partial_TD.contiguous()
        self._group.allreduce([partial_TD], distributed.AllreduceOptions()).wait()
        return partial_TD

    def joined(self, head: Projection, vocab: int) -> Projection:
        """Return a product with all rows of the vocabulary, on rank 0; other ranks contribute theirs."""

        def project(hidden_TD: Tensor) -> Tensor:
            with self.projecting(hidden_TD):
                self._group.broadcast([hidden_TD], distributed.BroadcastOptions()).wait()
                return self._gather(head(hidden_TD), vocab)

        return project

    def projecting(self, hidden_TD: Tensor) -> contextlib.AbstractContextManager[None]:
        """Project on all ranks; the hidden states are rank 0's."""
        return contextlib.nullcontext()

    def _gather(self, own_TV: Tensor, vocab: int) -> Tensor:
        """Return the columns of all ranks on rank 0, after comparing digests."""
        widths = [len(share(vocab, rank, self.ranks)) for rank in range(self.ranks)]
        size = max(widths) * len(own_TV) * own_TV.dtype.itemsize
        own_X = own_TV.new_zeros(size + DIGEST_BYTES, dtype=torch.uint8)
        own_X[: own_TV.nbytes] = own_TV.contiguous().view(torch.uint8).flatten()
        own_X[size:] = torch.tensor(list(self.digest.to_bytes(DIGEST_BYTES, "little")), dtype=torch.uint8)
        options = distributed.GatherOptions()
        options.rootRank = 0
        if self.rank:
            self._group.gather([], [own_X], options).wait()
            return own_TV
        parts = [torch.empty_like(own_X) for _ in range(self.ranks)]
        self._group.gather([parts], [own_X], options).wait()
        for rank, part_X in enumerate(parts):
            if not torch.equal(part_X[size:], own_X[size:]):
                raise EngineError(f"rank {rank} has run other tokens, or computed other numbers, than rank 0")
        columns = [
            part_X[: width * len(own_TV) * own_TV.dtype.itemsize].view(own_TV.dtype).view(len(own_TV), width)
            for part_X, width in zip(parts, widths, strict=True)
        ]
        return torch.cat(columns, 1)


class LeaderGroup(RankGroup):
    """Rank 0's group: it starts every operation of the others, and ends with the first of them.

    One thread uses it. Another watches the processes: any failure is final.
    """

    def __init__(
        self,
        group: "ProcessGroup",
        processes: Sequence[Popen[bytes]],
        connections: Sequence[Connection],
    ) -> None:
        super().__init__(group, 0, 1 + len(processes))
        self.processes, self.connections = processes, connections
        self.failure: str | None = None
        """Why no further step can run, or None."""
        self._has_failed, self._lock = threading.Event(), threading.Lock()
        self._is_closed = False
        self._report: Report | None = None

    def watch(self, report: Report) -> None:
        """Call `report`, from another thread, when a rank ends."""
        self._report = report
        threading.Thread(target=self._watch, name="specdec-ranks", daemon=True).start()

    @contextlib.contextmanager
    def command(self, operation: Operation, values: Sequence[int] = ()) -> Iterator[None]:
        """Send a command, and run rank 0's part of it; if either fails, the group has failed."""
        if self.failure:
            raise EngineError(self.failure)
        try:
            command = packed(operation, values)
            self.observe(command)
            for connection in self.connections:
                connection.send_bytes(command)
            yield
        except Exception as error:
            self._has_failed.wait(END_S)  # the end of a process tells more than a broken connection
            self.fail(f"tp: a step failed on rank 0 or between ranks: {error}; start the engine again.")
            raise EngineError(self.failure or "") from error

    def projecting(self, hidden_TD: Tensor) -> contextlib.AbstractContextManager[None]:
        """Send the other ranks the number of hidden states that follow."""
        return self.command(Operation.PROJECT, [len(hidden_TD)])

    def fail(self, failure: str) -> None:
        """Refuse further steps, and end the other ranks."""
        with self._lock:
            if self._is_closed or self.failure:
                return
            self.failure = failure
            self._has_failed.set()
        logger.critical("%s", failure)
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End the other ranks."""
        with self._lock:
            self._is_closed = True
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(packed(Operation.END, ()))
        for process in self.processes:
            try:
                process.wait(END_S)
            except TimeoutExpired:
                process.kill()
                process.wait()

    # The mirror of the arena.

    def zeroed(self, state: int) -> None:
        """Zero a state's slot on the other ranks."""
        with self.command(Operation.ZERO_STATE, [state]):
            pass

    def copied(self, blocks: Sequence[SlotPair], states: Sequence[SlotPair]) -> None:
        """Copy slots on the other ranks."""
        with self.command(Operation.COPY, [len(blocks), *(id for pair in (*blocks, *states) for id in pair)]):
            pass

    def gave_back(self) -> None:
        """Release the pages of the other ranks' arenas."""
        with self.command(Operation.GIVE_BACK):
            pass

    def _watch(self) -> None:
        ended = wait(self.connections)  # the other ranks send nothing more: their ends close with them
        if self._is_closed:
            return
        rank = 1 + min(self.connections.index(connection) for connection in ended)
        process = self.processes[rank - 1]
        with contextlib.suppress(TimeoutExpired):
            process.wait(END_S)
        self.fail(
            f"tp: rank {rank} (process {process.pid}) ended with code {process.returncode}; see its log, "
            "and start the engine again."
        )
        if self._report and self.failure:
            self._report(EngineError(self.failure))
