"""Draft with a head that predicts a whole block in one pass: every level of a tree has one distribution."""

from collections.abc import Sequence
from typing import Protocol

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

    def draft(self, window: Window, memory: Arena) -> Tensor:
        """Return hidden states [B, S, D] of the S next positions, from a window of one block per row.

        Writes memory behind the accepted positions only, where later passes overwrite it unseen.
        """
        ...


class BlockDrafter(HeadDrafter):
    """Draft with a block head; otherwise a `HeadDrafter`."""

    head: DraftBlock

    def _grow(self, drafts: Sequence[HeadGrowth]) -> None:
        """Rank all nodes of a level by the distribution of its position."""
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
            for draft, logits_SV in growing:
                level_V = logits_SV[draft.grower.depth]
                draft.after |= dict.fromkeys(draft.grower.frontier, level_V)
            expand([draft for draft, _ in growing], lambda logits_NV: logits_NV, self.rank)
