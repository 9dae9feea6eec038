"""Draft with a head that predicts a whole block in one pass.

Every level of a tree has one distribution, or one per token of the level above.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.draft.head import DraftHead, HeadDrafter, HeadGrowth
from specdec.draft.levels import expand
from specdec.state_slots.arena import Arena
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Window, build_window


class DraftBlock(DraftHead, Protocol):
    """A head whose `forward` only writes the memory of accepted positions, and needs no tokens."""

    mask: int
    """The token of all positions of a block but the first, which is the last accepted token."""

    @property
    def block(self) -> int: ...

    @property
    def has_bias(self) -> bool:
        """Return whether logits depend on the token drafted before."""
        ...

    def draft(self, window: Window, memory: Arena) -> Tensor:
        """Return hidden states [B, S, D] of the S next positions, from a window of one block per row.

        Writes memory behind the accepted positions only, where later passes overwrite it unseen.
        """
        ...

    def bias(self, token_N: Tensor) -> Tensor:
        """Return the bias [N, V] of the logits after each token."""
        ...


class BlockDrafter(HeadDrafter):
    """Draft with a block head; otherwise a `HeadDrafter`."""

    head: DraftBlock

    def _grow(self, drafts: Sequence[HeadGrowth]) -> None:
        """Rank the children of each node by the distribution of their position."""
        if not drafts:
            return
        head, masks = self.head, [self.head.mask] * (self.head.block - 1)
        rows = [
            self._row(
                TokenTree.chain([draft.want.tokens[-1], *masks]), len(draft.want.tokens) - 1, draft.want
            )
            for draft in drafts
        ]
        window = build_window(rows, 1, self.device)
        order = [at // head.block for at in window.first_B]
        deepest = max(draft.grower.shape.num_steps for draft in drafts)
        out_BSD = head.draft(window, self.arena)[order, :deepest]
        logits_BSV = head.logits(out_BSD.flatten(0, 1)).view(*out_BSD.shape[:2], -1)
        growing = list(zip(drafts, logits_BSV, strict=True))
        while growing := [(draft, logits_SV) for draft, logits_SV in growing if draft.grower.frontier]:
            above = [(draft, node) for draft, _ in growing for node in draft.grower.frontier]
            level_NV = torch.stack(
                [logits_SV[draft.grower.depth] for draft, logits_SV in growing for _ in draft.grower.frontier]
            )
            token_N = torch.tensor([draft.grower.tokens[node] for draft, node in above], device=self.device)
            if head.has_bias:
                level_NV = level_NV + head.bias(token_N)
            for (draft, node), level_V in zip(above, level_NV, strict=True):
                draft.after[node] = level_V
            expand([draft for draft, _ in growing], lambda logits_NV: logits_NV, self.rank)
