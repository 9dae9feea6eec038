"""A batch that decodes, as tensors that stay where they are: a captured step reads and writes them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from specdec.core.device.extent import Extent
from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.rules import NO_TOKEN, RowRule, make_column


@dataclass(frozen=True, slots=True)
class Rows:
    """B rows of windows of up to M nodes, P of them on an accepted path.

    A row of length 0 is padding: its state slot, blocks and records are those of the dummy slab.
    """

    length_B: Tensor
    """Tokens that the model has read and that count."""
    token_BM: Tensor
    """The window that is verified next: the root, chosen last, and what was drafted; -1 fills up."""
    parent_BM: Tensor
    score_BM: Tensor
    """What its drafter thought of each node, as a proposal has it; the root's entry means nothing."""
    belief_BM: Tensor
    table_BN: Tensor
    state_B: Tensor
    path_slab_BP: Tensor
    path_place_BP: Tensor
    path_length_B: Tensor
    slab_B2M: Tensor
    """Two sets of records: one is written while the path that the other holds is folded. They swap places."""
    place_B2M: Tensor
    snapshot_BM: Tensor
    seed_B: Tensor
    rule_B: tuple[Tensor, ...]
    """By what its tokens are chosen: a column for each number of a RowRule."""
    hidden_BPD: Tensor
    """What the head has yet to read: hidden states, and the token that followed each."""
    follows_BP: Tensor
    start_B: Tensor
    """From which position on, in a first window, and how many these are."""
    count_B: Tensor
    last_BD: Tensor
    """The hidden state that the root was chosen from."""

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
        """Make rows that are all padding, with room for this many blocks and hidden states of this width."""
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
            path_place_BP=ids(rows, path),
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
        """Make all rows padding again."""
        for own in self._values():
            if isinstance(own, Tensor):
                own.zero_()
        for x_B, off in zip(self.rule_B, RowRule(), strict=True):
            x_B.fill_(off)
        self.blank(0)
        self.parent_BM[:, 0] = NO_TOKEN

    def blank(self, nodes: int) -> None:
        """Leave the first nodes of every window; make the rest a chain of no tokens."""
        first, width = max(nodes, 1), self.token_BM.shape[1]
        self.token_BM[:, first:] = NO_TOKEN
        self.parent_BM[:, first:] = torch.arange(first - 1, width - 1, device=self.token_BM.device)
        self.score_BM[:, first:] = 0.0
        self.belief_BM[:, first:] = 0.0

    def drop(self, row_R: Tensor) -> None:
        """Make padding of some rows."""
        for x_B in (self.length_B, self.path_length_B, self.state_B):
            x_B.index_fill_(0, row_R, 0)
        for x_B, off in zip(self.rule_B, RowRule(), strict=True):
            x_B.index_fill_(0, row_R, off)
        for x_BM in (self.table_BN, self.slab_B2M, self.place_B2M, self.snapshot_BM, self.token_BM):
            x_BM.index_fill_(0, row_R, 0)

    def part(self, start: int, end: int) -> "Rows":
        """Show some rows alone (views)."""
        cut = slice(start, end)
        parts: Iterator[Any] = (
            own[cut] if isinstance(own, Tensor) else tuple(x[cut] for x in own) for own in self._values()
        )
        return Rows(*parts)

    @property
    def path(self) -> RecordIds:
        return RecordIds(self.path_slab_BP, self.path_place_BP)

    @property
    def temperature_B(self) -> Tensor:
        return self.rule_B[RowRule._fields.index("temperature")]

    def _values(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))
