"""The rows of one window width inside a packed step: the batch that kernels take."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class RecordIds(NamedTuple):
    """Draft records, by slab and index in the slab."""

    slab_BN: Tensor
    index_BN: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """B rows with windows of M tokens each: packed tokens [start, start + B*M).

    A row's committed state is its state slot *with the pending path's records folded in*. Certain tokens (a
    prefill chunk, plain decoding) advance the state to the last token of the window. Tentative tokens can be
    rejected from any node on: the committed state does not advance past the old path, and each token leaves a
    record, or a snapshot of the whole state in its own slot.
    """

    start: int
    rows: int
    width: int
    state_B: Tensor
    """State slot of each row (int64)."""
    path: RecordIds | None
    """Accepted records not yet folded into the state, padded to the longest path [B, P]."""
    path_length_B: Tensor | None
    record: RecordIds | None
    """Where the nodes write their records [B, M]."""
    snapshot_BM: Tensor | None
    """State slots (int64) for the state after each node; such rows have no pending path."""
    ancestors_BMM: Tensor | None
    """[b, i, j]: node j is an ancestor of i, or i itself. None: the window is a chain."""
    tap_BMC: Tensor | None
    """For each node the C inputs of its convolution, oldest first, as indices into the C-1 inputs before the
    window followed by the window's own. None: the window is a chain."""
    table_BN: Tensor
    """KV blocks of each row in order, padded with any valid id."""
    length_B: Tensor
    """Tokens with KV committed before this window."""
    max_length: int
    """Upper bound of `length_B`, known on the host."""

    def __post_init__(self) -> None:
        assert self.record is None or self.snapshot_BM is None, "a node leaves a record or a state"
        assert self.path is None or self.snapshot_BM is None, "a state that nodes start from is up to date"

    @property
    def tentative(self) -> bool:
        """Whether nodes may be rejected."""
        return self.record is not None or self.snapshot_BM is not None

    def take(self, x_T: Tensor) -> Tensor:
        """Return the group's slice of a packed tensor (a view)."""
        return x_T[self.start : self.start + self.rows * self.width]


class RecurrentMemory(NamedTuple):
    """One recurrent layer's strided views of the arena: S slabs of R records each.

    The delta rule and Mamba-2 have a state [H, K, W]; a layer that is only a convolution has H = 0. Records
    do not store keys: the convolution recomputes them from the inputs for the few tokens of a path.
    """

    state_SHKW: Tensor
    window_SIC: Tensor
    """The last I = kernel - 1 raw inputs of the convolution, oldest first."""
    update_SRHW: Tensor
    decay_SRH: Tensor
    """Each token's own log-decay: subtracting sums from the root would lose digits.

    Mixers with a decay vector over the keys have one more dimension, [S, R, H, K].
    """
    input_SRC: Tensor
