"""Draft with a rounded copy of the target, which reads what a sequence has committed as the target does.

A pass reads the draft so far as a window from its root on. Its nodes write keys, values and slots as those of
any draft do; then the slots go back, and the target's own window writes over the keys and values. So what is
committed stays what it is. The pending path is folded into the state, as by any window: that reads records,
and no matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import Stateless, Want
from specdec.draft.grow import Grower
from specdec.draft.levels import Growth, Rank, expand
from specdec.draft.proposal import Proposal
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Backing, Committed
from specdec.state_slots.window import Row, Window, build_window


class Copy(Protocol):
    """A network over the target's memory."""

    def forward(self, window: Window, memory: Arena) -> Tensor:
        """Return hidden states; write the window's keys, values and records."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor: ...


@dataclass(slots=True, kw_only=True)
class Scratch(Growth):
    """A draft that a copy grows in slots that it borrows."""

    slots: Sequence[Any]
    before: Committed
    """What the sequence had committed, with a path that its first pass folds."""

    def row(self, backing: Backing) -> Row:
        """Read the whole draft so far."""
        held, memory = self.before, self.want.memory
        assert memory is not None
        path = () if self.after else held.path
        row = Row(self.tree(self.ran), len(self.want.tokens) - 1, memory.table_N, held.state, path)
        return backing.dress(row, self.slots[: len(self.ran)])


class RoundedDrafter(Stateless):
    """Grows drafts level by level. Between calls it holds nothing, of no sequence."""

    def __init__(self, copy: Copy, backing: Backing, rank: Rank, device: torch.device) -> None:
        self.copy, self.backing, self.rank, self.device = copy, backing, rank, device
        self.calibrator = Calibrator()

    @torch.inference_mode()
    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """Grow all drafts together; one that finds no slots is empty."""
        grown = [self._begin(want) for want in wants]
        drafts = [growth for growth in grown if growth]
        growing = drafts
        while growing := [draft for draft in growing if draft.grower.frontier]:
            self._run(growing)
            expand(growing, self.copy.logits, self.rank)
        for draft in drafts:
            self._take_back(draft)
        return [growth.grower.finish() if growth else Proposal.EMPTY for growth in grown]

    def _begin(self, want: Want) -> Scratch | None:
        """Borrow a slot for each node above the last level; grow fewer levels where there are too few."""
        shape = want.shape
        while shape:
            slots = self.backing.begin(want.key, 1 + shape.topk * (shape.num_steps - 1))
            if slots is not None:
                assert want.memory is not None
                before = want.memory.committed or Committed(0)
                grower = Grower(shape, self.calibrator)
                return Scratch(want=want, grower=grower, slots=slots, before=before)
            shape = replace(shape, num_steps=shape.num_steps - 1) if shape.num_steps > 1 else None
        return None

    def _run(self, drafts: Sequence[Scratch]) -> None:
        """Read the drafts again, with the levels that are new."""
        for draft in drafts:
            draft.ran += draft.grower.frontier
        # Blocks may have moved while slots were borrowed: tables are read here, behind that.
        rows = [draft.row(self.backing) for draft in drafts]
        window = build_window(rows, self.backing.arena.layout.conv_width, self.device)
        hidden_TD = self.copy.forward(window, self.backing.arena)
        for draft, first in zip(drafts, window.first_B, strict=True):
            draft.after.update(zip(draft.ran, hidden_TD[first : first + len(draft.ran)], strict=True))

    def _take_back(self, draft: Scratch) -> None:
        """Keep no node; the path before the draft is folded."""
        memory = draft.want.memory
        if memory and memory.committed:
            memory.committed = self.backing.promote(draft.want.key, draft.before, draft.slots, ())
