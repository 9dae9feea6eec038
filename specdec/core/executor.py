"""The decode loop's interface to the network, independent of where weights and memory are."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.kernels.table import Kernels
from specdec.models.network import Network
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.window import Row, build_window, record_ids


class Forward(NamedTuple):
    """The hidden states of a packed window."""

    first_B: Sequence[int]
    """Index of each row's first token."""
    hidden_TD: Tensor
    aux: Sequence[Tensor]
    """Input residual streams of the requested layers."""


class Executor(Protocol):
    """Runs the network over the rows of a step; the loop sees only ids and hidden states."""

    device: torch.device
    kernels: Kernels

    def forward(self, rows: Sequence[Row], aux_layers: Sequence[int]) -> Forward:
        """Compute the hidden states of every row's window, and write its keys, values and records."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits of a few hidden states."""
        ...

    def move(self, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        """Copy keys and values from positions to others of the same sequence."""
        ...

    def fold(self, committed: Sequence[CommittedState]) -> None:
        """Fold accepted records into their states."""
        ...

    def watch(self, report: Callable[[SpecdecError], None]) -> None:
        """Call `report`, from another thread, if the executor fails between two steps."""
        ...

    def recover(self) -> None:
        """Prepare for the next step after a failed one; raise if there can be none."""
        ...

    def close(self) -> None:
        """Release what other processes hold."""
        ...


class LocalExecutor:
    """Runs the network in this process, on one device."""

    def __init__(self, network: Network, arena: Arena, device: torch.device) -> None:
        self.network, self.arena, self.device, self.kernels = network, arena, device, network.kernels
        self._conv_width = arena.layout.conv_width

    def forward(self, rows: Sequence[Row], aux_layers: Sequence[int]) -> Forward:
        """Compute the hidden states of every row's window."""
        window = build_window(rows, self._conv_width, self.device)
        return Forward(window.first_B, *self.network.forward_with_aux(window, self.arena, aux_layers))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits of a few hidden states."""
        return self.network.logits(hidden_TD)

    def move(self, table_BN: Tensor, from_BP: Tensor, to_BP: Tensor) -> None:
        """Copy keys and values from positions to others of the same sequence."""
        self.network.move(self.arena, *(ids.to(self.device) for ids in (table_BN, from_BP, to_BP)))

    def fold(self, committed: Sequence[CommittedState]) -> None:
        """Fold accepted records into their states."""
        path, length_B = record_ids([item.path for item in committed], self.device)
        state_B = torch.tensor([item.state for item in committed], device=self.device)
        self.network.materialize(self.arena, state_B, path, length_B)

    def watch(self, report: Callable[[SpecdecError], None]) -> None:
        """Do nothing: it fails in steps only."""

    def recover(self) -> None:
        """Wait for the device; raise if it is unusable."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Do nothing: there are no other processes."""
