"""What a step on the device tells the host: for every row what was verified, and what came of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.draft.proposal import Proposal
from specdec.state_slots.tree import TokenTree


class Result(NamedTuple):
    """What became of every row's window; of B rows, and of M nodes."""

    count_B: Tensor
    """How many nodes were kept."""
    node_BM: Tensor
    emitted_BM: Tensor
    token_BM: Tensor
    parent_BM: Tensor
    score_BM: Tensor
    belief_BM: Tensor


def pack(result: Result) -> Tensor:
    """Put a result into one tensor of int64, so that one copy brings it to the host."""
    count_B, *whole, score_BM, belief_BM = result
    floats = score_BM.view(torch.int64), belief_BM.view(torch.int64)
    return torch.cat([count_B[:, None], *whole, *floats], dim=1)


class Outcome(NamedTuple):
    """One row's."""

    tree: TokenTree
    proposal: Proposal | None
    """What the device drafted of the tree; None where it did not, or not in the step's shape."""
    nodes: tuple[int, ...]
    """The nodes that were kept, the root first; none where the target's numbers were NaN at the root."""
    emitted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pending:
    """A result on its way to the host."""

    key: GraphKey
    as_drafted: bool
    """The windows were drafted in this key's shape; else their nodes stand for another tree."""
    packed_BX: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def send(cls, key: GraphKey, result_BX: Tensor, *, as_drafted: bool) -> "Pending":
        """Copy a result, which the next step may write over, to where the host can read it."""
        if not result_BX.is_cuda:
            return cls(key, as_drafted, result_BX, None)
        packed_BX = torch.empty(result_BX.shape, dtype=result_BX.dtype, pin_memory=True)
        packed_BX.copy_(result_BX, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(key, as_drafted, packed_BX, arrived)

    def wait(self) -> None:
        """Return when the host may read it."""
        if self.arrived is not None:
            self.arrived.synchronize()

    def outcomes(self, rows: Iterable[int]) -> Iterator[Outcome]:
        """Read some rows of it. A window that was filled up is read to its last token."""
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
            yield Outcome(tree, proposal, tuple(nodes[: row[0]]), tuple(emitted[: row[0]]))
