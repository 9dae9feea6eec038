"""Device tensors of a decoding batch, at fixed addresses for captured steps."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from specdec.core.device.extent import Extent
from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.rules import NO_TOKEN, RowRule, make_column


@dataclass(frozen=True, slots=True)
class BatchRows:
    """State of B rows: windows of up to M nodes, accepted paths of up to P.

    A row of length 0 is padding: its state slot, blocks and records are those of the dummy slab.
    """

    length_B: Tensor
    """Number of committed tokens."""
    token_BM: Tensor
    """Next window: the last sampled token as root, then the draft, padded with -1."""
    parent_BM: Tensor
    score_BM: Tensor
    """Scores and beliefs of the proposal; the root's entries are unused."""
    belief_BM: Tensor
    table_BN: Tensor
    state_B: Tensor
    path_slab_BP: Tensor
    path_index_BP: Tensor
    path_length_B: Tensor
    slab_B2M: Tensor
    """Two sets of record slots: one is written while the other's path is folded. They swap each step."""
    place_B2M: Tensor
    snapshot_BM: Tensor
    seed_B: Tensor
    rule_B: tuple[Tensor, ...]
    """Sampling parameters: one column per field of RowRule."""
    hidden_BPD: Tensor
    """Pending inputs of the head: hidden states, and the token that followed each."""
    follows_BP: Tensor
    start_B: Tensor
    """For a first window: first pending position, and number of pending hidden states."""
    count_B: Tensor
    last_BD: Tensor
    """Hidden state from which the root was sampled."""

    @classmethod
    def empty(
        cls,
        extent: Extent,
        *,
        blocks: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Allocate padding rows with capacity for this many blocks and this hidden size."""
        rows, nodes, path = extent.rows, extent.nodes, extent.path

        def ids(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        made = cls(
            length_B=ids(rows),
            token_BM=ids(rows, nodes),
            parent_BM=ids(rows, nodes),
            score_BM=numbers(rows, nodes, dtype=torch.float64),
            belief_BM=numbers(rows, nodes, dtype=torch.float64),
            table_BN=ids(rows, blocks),
            state_B=ids(rows),
            path_slab_BP=ids(rows, path),
            path_index_BP=ids(rows, path),
            path_length_B=ids(rows),
            slab_B2M=ids(rows, 2, nodes),
            place_B2M=ids(rows, 2, nodes),
            snapshot_BM=ids(rows, nodes),
            seed_B=ids(rows),
            rule_B=tuple(make_column([off] * rows, device) for off in RowRule()),
            hidden_BPD=numbers(rows, path, hidden, dtype=dtype),
            follows_BP=ids(rows, path),
            start_B=ids(rows),
            count_B=ids(rows),
            last_BD=numbers(rows, hidden, dtype=dtype),
        )
        made.clear()
        return made

    def clear(self) -> None:
        """Reset all rows to padding."""
        for value in self._values():
            if isinstance(value, Tensor):
                value.zero_()
        for x_B, off in zip(self.rule_B, RowRule(), strict=True):
            x_B.fill_(off)
        self.blank(0)
        self.parent_BM[:, 0] = NO_TOKEN

    def blank(self, nodes: int) -> None:
        """Reset all but the first `nodes` of every window to a chain of `NO_TOKEN`."""
        first, width = max(nodes, 1), self.token_BM.shape[1]
        self.token_BM[:, first:] = NO_TOKEN
        self.parent_BM[:, first:] = torch.arange(first - 1, width - 1, device=self.token_BM.device)
        self.score_BM[:, first:] = 0.0
        self.belief_BM[:, first:] = 0.0

    def drop(self, row_R: Tensor) -> None:
        """Turn some rows into padding."""
        for x_B in (self.length_B, self.path_length_B, self.state_B):
            x_B.index_fill_(0, row_R, 0)
        for x_B, off in zip(self.rule_B, RowRule(), strict=True):
            x_B.index_fill_(0, row_R, off)
        for x_BM in (self.table_BN, self.slab_B2M, self.place_B2M, self.snapshot_BM, self.token_BM):
            x_BM.index_fill_(0, row_R, 0)

    def part(self, start: int, end: int) -> "BatchRows":
        """Return a view of some rows."""
        cut = slice(start, end)
        parts: Iterator[Any] = (
            value[cut] if isinstance(value, Tensor) else tuple(x[cut] for x in value)
            for value in self._values()
        )
        return BatchRows(*parts)

    @property
    def path(self) -> RecordIds:
        return RecordIds(self.path_slab_BP, self.path_index_BP)

    @property
    def temperature_B(self) -> Tensor:
        return self.rule_B[RowRule._fields.index("temperature")]

    def _values(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))
