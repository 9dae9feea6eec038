"""Grow the drafts of several sequences level by level, from a network's output at each node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.draft.drafter import DraftRequest
from specdec.draft.grow import Grower


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """A position to guess a token for: the sequence, and the draft tokens since its root."""

    want: DraftRequest
    path: tuple[int, ...]


Rank = Callable[[Tensor, Sequence[DraftPosition], int], Sequence[tuple[Sequence[int], Sequence[float]]]]
"""Maps logits, positions and k to the k best tokens of each position and their probabilities."""


@dataclass(slots=True, kw_only=True)
class DraftGrowth:
    """One row's draft while it grows, and the network's output after each processed node."""

    want: DraftRequest
    grower: Grower
    after: dict[int, Tensor] = field(default_factory=dict)

    def path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node:
            tokens.append(self.grower.tokens[node])
            node = self.grower.parents[node]
        return tuple(reversed(tokens))


def expand(drafts: Sequence[DraftGrowth], logits: Callable[[Tensor], Tensor], rank: Rank) -> None:
    """Add the children of every frontier node, in one batch."""
    at = [(draft, node) for draft in drafts for node in draft.grower.frontier]
    logits_NV = logits(torch.stack([draft.after[node] for draft, node in at]))
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    positions = [DraftPosition(draft.want, draft.path(node)) for draft, node in at]
    topk = max(draft.grower.shape.topk for draft in drafts)
    for (draft, node), (tokens, shares) in zip(at, rank(logits_NV, positions, topk), strict=True):
        draft.grower.add(node, tokens, shares)
