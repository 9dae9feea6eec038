"""The rows of one width inside a packed step, as kernels take them."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class RecordIds(NamedTuple):
    """Draft records by slab and index in it."""

    slab_BN: Tensor
    index_BN: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Describe B rows whose windows all have M tokens; packed tokens [start, start + B*M) are theirs.

    What a row has committed is its state slot *with the path of records folded in*. A window whose
    tokens are all certain (a prompt's chunk, plain decoding) leaves behind the state advanced to its
    last token; a tentative one can still be taken back to any node, because the committed state does not
    advance past the old path: each token leaves a record, or the whole state after it in a slot of its own.
    """

    start: int
    rows: int
    width: int
    state_B: Tensor
    """State slot of each row (int64)."""
    path: RecordIds | None
    """Accepted records that are not yet folded into the state, padded to the longest path [B, P]."""
    path_length_B: Tensor | None
    record: RecordIds | None
    """Where the nodes leave their records [B, M]."""
    snapshot_BM: Tensor | None
    """State slots (int64) in which the nodes leave the state after them; such rows have no pending path."""
    ancestors_BMM: Tensor | None
    """[b, i, j]: node j is an ancestor of i, or i itself. None: the window is a chain."""
    tap_BMC: Tensor | None
    """For each node the C inputs of its convolution, oldest first, as indices into the C-1 inputs before
    the window followed by the window's own. None: the window is a chain."""
    table_BN: Tensor
    """KV blocks of each row in order, padded with any valid id."""
    length_B: Tensor
    """Tokens whose KV was committed before this window."""
    max_length: int
    """None of `length_B` is larger: a number the host knows."""

    def __post_init__(self) -> None:
        assert self.record is None or self.snapshot_BM is None, "a node leaves a record or a state"
        assert self.path is None or self.snapshot_BM is None, "a state that nodes start from is up to date"

    @property
    def tentative(self) -> bool:
        """Whether nodes may be rejected."""
        return self.record is not None or self.snapshot_BM is not None

    def take(self, x_T: Tensor) -> Tensor:
        """Return the group's part of a packed tensor (a view)."""
        return x_T[self.start : self.start + self.rows * self.width]


class RecurrentMemory(NamedTuple):
    """One recurrent layer's strided views of the arena. S counts slabs, R records in a slab.

    The delta rule and Mamba-2 keep a state [H, K, W]; a layer that is a convolution alone has H = 0. A record
    holds no key: the convolution makes it again from the inputs, for the few tokens of a path.
    """

    state_SHKW: Tensor
    window_SIC: Tensor
    """The last I = kernel - 1 raw inputs of the convolution, oldest first."""
    update_SRHW: Tensor
    decay_SRH: Tensor
    """Each token's own log-decay: sums from a root would lose digits where they are subtracted.

    A mixer whose decay is a vector over the keys has one more dimension, [S, R, H, K].
    """
    input_SRC: Tensor
