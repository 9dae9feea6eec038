"""Draft with a rounded copy of the target, which goes on from what a sequence has committed.

A draft begins with a copy of the sequence's state, and the path that is pending beside it; there the rounded
network decodes token by token. Its keys and values stand where the target's own window, which begins with the
root, writes next. So nothing that is committed changes.

Drafts are chains: a tree would take a state for each branch, and next to a guess that is mostly right the
others are worth little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import Memory, Stateless, Want
from specdec.draft.grow import Grower
from specdec.draft.levels import Growth, Rank, expand
from specdec.draft.proposal import Proposal
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window


class Copy(Protocol):
    """A network over the target's memory."""

    def forward(self, window: Window, memory: Arena) -> Tensor:
        """Return hidden states; write keys and values, and bring states on."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Continuation(Growth):
    """A chain that grows from a state of its own."""

    memory: Memory
    held: Committed
    """A state of its own, and until the first token is read the path that it does not hold yet."""

    def row(self) -> Row:
        """Read the token that the chain ends with."""
        (node,), length = self.grower.frontier, len(self.want.tokens) - 1 + self.grower.depth
        tree = TokenTree.chain([self.grower.tokens[node]])
        return Row(tree, length, self.memory.table_N, self.held.state, self.held.path)


class RoundedDrafter(Stateless):
    """Grows chains in states that it borrows. Between calls it holds nothing, of no sequence."""

    def __init__(self, copy: Copy, arena: Arena, rank: Rank, device: torch.device) -> None:
        self.copy, self.arena, self.rank, self.device = copy, arena, rank, device
        self.calibrator = Calibrator()

    @torch.inference_mode()
    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """Grow all drafts together; one for which there is no state is empty."""
        grown = [self._begin(want) for want in wants]
        drafts = [growth for growth in grown if growth]
        growing = drafts
        while growing := [draft for draft in growing if draft.grower.frontier]:
            self._run(growing)
            expand(growing, self.copy.logits, self.rank)
        for draft in drafts:
            if self.arena.layout.states:
                self.arena.release_state(draft.want.key, draft.held.state)
        return [
            growth.grower.finish() if growth else Proposal.bare(want.tokens[-1])
            for want, growth in zip(wants, grown, strict=True)
        ]

    def _begin(self, want: Want) -> Continuation | None:
        """Copy a sequence's state, if it has one."""
        if want.shape is None:
            return None
        assert want.memory is not None
        held = Committed(0)
        if committed := want.memory.committed:
            slots = self.arena.take_snapshots(want.key, 1)
            if slots is None:
                return None
            held = replace(committed, state=slots[0])
            self.arena.state_bytes_X(held.state).copy_(self.arena.state_bytes_X(committed.state))
        grower = Grower(want.tokens[-1], want.shape, self.calibrator)
        return Continuation(want=want, grower=grower, memory=want.memory, held=held)

    def _run(self, drafts: Sequence[Continuation]) -> None:
        """Read the last token of each chain."""
        # Blocks may have moved while states were borrowed: tables are read here, behind that.
        rows = [draft.row() for draft in drafts]
        window = build_window(rows, self.arena.layout.conv_width, self.device)
        hidden_TD = self.copy.forward(window, self.arena)
        for draft, first in zip(drafts, window.first_B, strict=True):
            draft.after[draft.grower.frontier[0]] = hidden_TD[first]
            draft.held = Committed(draft.held.state)
