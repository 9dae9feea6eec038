"""Executors of a tensor-parallel group: rank 0's, and the loop of the other ranks."""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from specdec.core.executor import Forward, LocalExecutor
from specdec.core.parallel.commands import (
    Operation,
    Reader,
    pack_committed,
    pack_rows,
    unpack_committed,
    unpack_rows,
    unpacked,
)
from specdec.core.parallel.group import LeaderGroup, RankGroup
from specdec.errors import EngineError, SpecdecError
from specdec.models.network import Network
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.window import Row


class LeaderExecutor(LocalExecutor):
    """Rank 0: every operation on the network or the arena also runs on the other ranks."""

    def __init__(self, network: Network, arena: Arena, device: torch.device, group: LeaderGroup) -> None:
        super().__init__(network, arena, device)
        self.group = group
        arena.mirror = group

    def forward(self, rows: Sequence[Row], aux_layers: Sequence[int]) -> Forward:
        """Compute the hidden states of every row's window."""
        with self.group.command(Operation.FORWARD, pack_rows(rows)):
            forward = super().forward(rows, aux_layers)
            self.group.observe_hidden(forward.hidden_TD)
        return forward

    def move(self, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        """Copy keys and values from positions to others of the same sequence."""
        values = [
            value for ids in (table_BN, from_BP, to_BP) for value in (*ids.shape, *ids.flatten().tolist())
        ]
        with self.group.command(Operation.MOVE, values):
            super().move(table_BN, from_BP, to_BP)

    def fold(self, committed: Sequence[CommittedState]) -> None:
        """Fold accepted records into their states."""
        with self.group.command(Operation.FOLD, pack_committed(committed)):
            super().fold(committed)

    def watch(self, report: Callable[[SpecdecError], None]) -> None:
        """Call `report`, from another thread, when a rank ends."""
        self.group.watch(report)

    def recover(self) -> None:
        """Raise if the failed step has left the ranks in different states."""
        if self.group.failure:
            raise EngineError(self.group.failure)
        super().recover()

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()


@torch.inference_mode()
def serve(executor: LocalExecutor, group: RankGroup, connection: Connection) -> None:
    """Run the commands of rank 0 until it ends."""
    arena, network = executor.arena, executor.network
    while True:
        try:
            command = connection.recv_bytes()
        except EOFError:
            return
        group.observe(command)
        operation, values = unpacked(command)
        match operation:
            case Operation.FORWARD:
                group.observe_hidden(executor.forward(unpack_rows(values), ()).hidden_TD)
            case Operation.PROJECT:
                network.head(network.embed_VD.new_empty(values[0], network.spec.hidden))
            case Operation.MOVE:
                reader = Reader(values)
                executor.move(*(_matrix(reader) for _ in range(3)))
            case Operation.FOLD:
                executor.fold(unpack_committed(values))
            case Operation.ZERO_STATE:
                arena.zero_state(*values)
            case Operation.COPY:
                pairs = list(zip(values[1::2], values[2::2], strict=True))
                arena.copy_from(arena, pairs[: values[0]], pairs[values[0] :])
            case Operation.GIVE_BACK:
                arena.give_back()
            case Operation.END:
                return


def _matrix(reader: Reader) -> Tensor:
    height, width = reader.take(2)
    return torch.tensor(reader.take(height * width), dtype=torch.int64).view(height, width)
