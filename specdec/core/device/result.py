"""What a step on the device tells the host: for every row what was verified, and what came of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.device.graph_key import GraphKey
from specdec.draft.proposal import Proposal
from specdec.state_slots.tree import TokenTree


class Result(NamedTuple):
    """What became of every row's window, as tensors or as lists; of B rows, and of M nodes."""

    count_B: Any
    """How many nodes were kept."""
    node_BM: Any
    emitted_BM: Any
    token_BM: Any
    parent_BM: Any
    score_BM: Any
    belief_BM: Any


def pack(result: Result) -> Tensor:
    """Put a result into one tensor of int64, so that one copy brings it to the host."""
    count_B, *whole, score_BM, belief_BM = result
    floats = score_BM.view(torch.int64), belief_BM.view(torch.int64)
    return torch.cat([count_B[:, None], *whole, *floats], dim=1)


def unpack(packed_BX: Tensor, nodes: int) -> Result:
    """Read on the host what `pack` made, as lists."""
    whole = packed_BX.tolist()
    floats = packed_BX.view(torch.float64).tolist()  # of which those count that are scores and beliefs
    fields = [
        [(floats if i > 3 else whole)[b][1 + i * nodes :][:nodes] for b in range(len(whole))]
        for i in range(6)
    ]
    return Result([own[0] for own in whole], *fields)


class Outcome(NamedTuple):
    """One row's."""

    tree: TokenTree
    proposal: Proposal
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
        counts, nodes, emitted, tokens, parents, scores, beliefs = unpack(self.packed_BX, m)
        for b in rows:
            width = next((i for i, token in enumerate(tokens[b]) if token < 0), m)
            proposal = Proposal.EMPTY
            if self.as_drafted:
                proposal = Proposal(
                    tokens=tuple(tokens[b][1:width]),
                    parents=tuple(parent - 1 for parent in parents[b][1:width]),
                    scores=tuple(scores[b][1:width]),
                    beliefs=tuple(beliefs[b][1:width]),
                )
            tree = TokenTree(tuple(tokens[b][:width]), tuple(parents[b][:width]))
            yield Outcome(tree, proposal, tuple(nodes[b][: counts[b]]), tuple(emitted[b][: counts[b]]))
