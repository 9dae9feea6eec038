"""A device step's result for the host: each row's verified window and accepted path."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.draft.proposal import Proposal
from specdec.state_slots.tree import TokenTree


class ResultTensors(NamedTuple):
    """Result tensors of B rows and M nodes."""

    count_B: Tensor
    """Number of accepted nodes, the root included."""
    node_BM: Tensor
    emitted_BM: Tensor
    token_BM: Tensor
    parent_BM: Tensor
    score_BM: Tensor
    belief_BM: Tensor


def pack(result: ResultTensors) -> Tensor:
    """Pack a result into one int64 tensor, for a single copy to the host."""
    count_B, *whole, score_BM, belief_BM = result
    floats = score_BM.view(torch.int64), belief_BM.view(torch.int64)
    return torch.cat([count_B[:, None], *whole, *floats], dim=1)


class RowResult(NamedTuple):
    """One row's result."""

    tree: TokenTree
    proposal: Proposal | None
    """The device's proposal for the tree; None if it has none, or not in the step's shape."""
    nodes: tuple[int, ...]
    """Accepted nodes, the root first; empty if the target's logits at the root were NaN."""
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PendingResult:
    """A result being copied to the host."""

    key: GraphKey
    as_drafted: bool
    """Whether the windows were drafted in this key's shape; else scores belong to another tree."""
    packed_BX: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, key: GraphKey, result_BX: Tensor, *, as_drafted: bool) -> "PendingResult":
        """Start copying a result to the host, before the next step overwrites it."""
        if not result_BX.is_cuda:
            return cls(key, as_drafted, result_BX, None)
        packed_BX = torch.empty(result_BX.shape, dtype=result_BX.dtype, pin_memory=True)
        packed_BX.copy_(result_BX, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(key, as_drafted, packed_BX, arrived)

    def wait(self) -> None:
        """Wait until the copy has finished."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def outcomes(self, rows: Iterable[int]) -> Iterator[RowResult]:
        """Yield the outcomes of some rows, with windows cut to their last token."""
        m = self.key.nodes
        whole = self.packed_BX.tolist()
        floats = self.packed_BX.view(torch.float64).tolist() if self.as_drafted and m > 1 else []
        for b in rows:
            row = whole[b]
            nodes, emitted, tokens, parents = (row[1 + i * m : 1 + (i + 1) * m] for i in range(4))
            width = next((i for i, token in enumerate(tokens) if token < 0), m)
            tree, proposal = TokenTree(tuple(tokens[:width]), tuple(parents[:width])), None
            if floats:
                scores, beliefs = (floats[b][1 + i * m :][1:width] for i in (4, 5))
                proposal = Proposal(tree, (1.0, *scores), (1.0, *beliefs))
            yield RowResult(tree, proposal, tuple(nodes[: row[0]]), tuple(emitted[: row[0]]))
