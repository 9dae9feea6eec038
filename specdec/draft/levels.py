"""Grow the drafts of several sequences level by level, each by what a network says of its nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.draft.drafter import Want
from specdec.draft.grow import Grower


@dataclass(frozen=True, slots=True)
class Place:
    """Where a token is to be guessed: for which sequence, after which drafted tokens."""

    want: Want
    path: tuple[int, ...]


Rank = Callable[[Tensor, Sequence[Place], int], Sequence[tuple[Sequence[int], Sequence[float]]]]
"""Given logits for some places and a number, the best tokens of each place and how sure they are."""


@dataclass(slots=True, kw_only=True)
class Growth:
    """One row's draft while it grows, and what the network wrote after each node that it has read."""

    want: Want
    grower: Grower
    after: dict[int, Tensor] = field(default_factory=dict)

    def path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node:
            tokens.append(self.grower.tokens[node])
            node = self.grower.parents[node]
        return tuple(reversed(tokens))


def expand(drafts: Sequence[Growth], logits: Callable[[Tensor], Tensor], rank: Rank) -> None:
    """Ask for the children of every frontier node at once."""
    at = [(draft, node) for draft in drafts for node in draft.grower.frontier]
    logits_NV = logits(torch.stack([draft.after[node] for draft, node in at]))
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    places = [Place(draft.want, draft.path(node)) for draft, node in at]
    topk = max(draft.grower.shape.topk for draft in drafts)
    for (draft, node), (tokens, shares) in zip(at, rank(logits_NV, places, topk), strict=True):
        draft.grower.add(node, tokens, shares)
