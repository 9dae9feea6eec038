"""Draft with a quantised copy of the target that starts from the sequence's committed state.

A draft starts from a copy of the sequence's state and its pending path, and the quantised network decodes
token by token. Its keys and values go to the positions that the target's next window, which starts with the
root, will overwrite. Committed data are never modified.

Drafts are chains: a tree would need a state per branch, and alternatives to a mostly correct guess gain
little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest, SequenceMemory, StatelessDrafter
from specdec.draft.grow import Grower
from specdec.draft.levels import DraftGrowth, Rank, expand
from specdec.draft.proposal import Proposal
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window


class QuantisedCopy(Protocol):
    """A network that shares the target's KV cache and states."""

    def forward(self, window: Window, memory: Arena) -> Tensor:
        """Return hidden states; write keys and values, and advance the states."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class ChainContinuation(DraftGrowth):
    """A chain that grows from its own copy of the state."""

    memory: SequenceMemory
    held: CommittedState
    """The copied state, and until the first token is processed the pending path not yet folded into it."""

    def row(self) -> Row:
        """Return the window row of the chain's last token."""
        (node,), length = self.grower.frontier, len(self.want.tokens) - 1 + self.grower.depth
        tree = TokenTree.chain([self.grower.tokens[node]])
        return Row(tree, length, self.memory.table_N, self.held.state, self.held.path)


class RoundedDrafter(StatelessDrafter):
    """Draft chains in borrowed state slots. Nothing is stored between calls."""

    def __init__(self, copy: QuantisedCopy, arena: Arena, rank: Rank, device: torch.device) -> None:
        self.copy, self.arena, self.rank, self.device = copy, arena, rank, device
        self.calibrator = Calibrator()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Grow all drafts together; a sequence gets an empty one if no state slot is free."""
        grown = [self._begin(request) for request in requests]
        drafts = [growth for growth in grown if growth]
        growing = drafts
        while growing := [draft for draft in growing if draft.grower.frontier]:
            self._run(growing)
            expand(growing, self.copy.logits, self.rank)
        for draft in drafts:
            if self.arena.layout.states:
                self.arena.release_state(draft.want.key, draft.held.state)
        return [
            growth.grower.finish() if growth else Proposal.bare(request.tokens[-1])
            for request, growth in zip(requests, grown, strict=True)
        ]

    def _begin(self, request: DraftRequest) -> ChainContinuation | None:
        """Start a draft on a copy of the sequence's state; None without a shape or a free slot."""
        if request.shape is None:
            return None
        assert request.memory is not None
        held = CommittedState(0)
        if committed := request.memory.committed:
            slots = self.arena.take_snapshots(request.key, 1)
            if slots is None:
                return None
            held = replace(committed, state=slots[0])
            self.arena.state_bytes_X(held.state).copy_(self.arena.state_bytes_X(committed.state))
        grower = Grower(request.tokens[-1], request.shape, self.calibrator)
        return ChainContinuation(want=request, grower=grower, memory=request.memory, held=held)

    def _run(self, drafts: Sequence[ChainContinuation]) -> None:
        """Process the last token of each chain."""
        # Borrowing states may move blocks, so block tables are read after it.
        rows = [draft.row() for draft in drafts]
        window = build_window(rows, self.arena.layout.conv_width, self.device)
        hidden_TD = self.copy.forward(window, self.arena)
        for draft, first in zip(drafts, window.first_B, strict=True):
            draft.after[draft.grower.frontier[0]] = hidden_TD[first]
            draft.held = CommittedState(draft.held.state)
