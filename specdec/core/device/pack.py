"""Build the network's input window from device rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.device.rows import BatchRows
from specdec.kernels.group import Group, RecordIds
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.table import Kernels
from specdec.state_slots.window import Window


@dataclass(frozen=True, slots=True)
class WindowSlots:
    """State inputs and outputs of a window's nodes; a head has none."""

    state_B: Tensor
    path: RecordIds | None
    path_length_B: Tensor | None
    record: RecordIds | None
    snapshot_BM: Tensor | None


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs all rows into one group of equal window width."""

    kernels: Kernels
    conv_width: int
    max_length: int
    asks: bool
    """Whether kernels get the longest row's length, which waits for the device; else the maximum."""
    block_tokens: int

    def __call__(
        self,
        rows: BatchRows,
        token_BM: Tensor,
        parent_BM: Tensor | None,
        length_B: Tensor,
        slots: WindowSlots | None = None,
        *,
        last: int | None = None,
    ) -> Window:
        """Build a window after each row's tokens; without parents it is a chain.

        Positions are clamped to the model's length; sequences end before they get there. With `last`, only
        the blocks of the last `last` tokens and of the window are visible.
        """
        b, m = token_BM.shape
        ancestors_BMM = tap_BMC = None
        depth_BM = torch.arange(m, device=token_BM.device).expand(b, m)
        if parent_BM is not None:
            depth_BM, ancestors_BMM, tap_BMC = self.kernels.relations(parent_BM, self.conv_width)
        position_BM = (length_B[:, None] + depth_BM).clamp(max=self.max_length - 1)
        table_BN, longest = rows.table_BN, self.max_length
        if last is not None:
            table_BN, length_B = self._near(table_BN, length_B, last, m)
            longest = min(last + self.block_tokens - 1, longest)
        group = Group(
            start=0,
            rows=b,
            width=m,
            state_B=slots.state_B if slots else torch.zeros_like(length_B),
            path=slots.path if slots else None,
            path_length_B=slots.path_length_B if slots else None,
            record=slots.record if slots else None,
            snapshot_BM=slots.snapshot_BM if slots else None,
            ancestors_BMM=ancestors_BMM,
            tap_BMC=tap_BMC,
            table_BN=table_BN,
            length_B=length_B,
            max_length=int(length_B.max()) if self.asks else longest,
        )
        token_T = token_BM.clamp(min=0).reshape(-1)
        return Window(token_T, position_BM.reshape(-1), (group,), tuple(range(0, b * m, m)))

    def _near(self, table_BN: Tensor, length_B: Tensor, last: int, width: int) -> tuple[Tensor, Tensor]:
        """Return each row's block table cut to its last tokens and window, and the number of these tokens."""
        size, max_blocks = self.block_tokens, table_BN.shape[1]
        first_B = (length_B - last).clamp(min=0) // size
        count = min(-(-(last + size - 1 + width) // size), max_blocks)
        at_BN = (first_B[:, None] + torch.arange(count, device=table_BN.device)).clamp(max=max_blocks - 1)
        return table_BN.gather(1, at_BN), length_B - first_B * size


def repeat_rows(x_B: Tensor, count: int) -> Tensor:
    """Repeat each row's value for its nodes, in contiguous memory, which kernels index entry by entry.

    For a single row, a reshape would return a view with stride 0.
    """
    return x_B[:, None].expand(-1, count).contiguous().view(-1)


def rules(rows: BatchRows, count: int, *, filtered: bool) -> Rules:
    """Return the sampling rules of each row's nodes: the temperature alone, or all of them if `filtered`."""
    if not filtered:
        return Rules(repeat_rows(rows.temperature_B, count))
    return Rules.of(repeat_rows(x_B, count) for x_B in rows.rule_B)
