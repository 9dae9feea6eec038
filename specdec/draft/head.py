"""Draft with a head that reads the target's hidden states: its own multi-token head, run on itself.

The head keeps KV of its own in the sequence's blocks. At position p it reads the target's hidden state there
and the token that was chosen to follow; below the last certain token it reads what it wrote itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import Want
from specdec.draft.grow import Grower
from specdec.draft.levels import Growth, Rank, expand
from specdec.draft.proposal import Proposal
from specdec.kernels.sampling.rules import Rules
from specdec.state_slots.arena import Arena
from specdec.state_slots.slots import RequestId
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window

MOST_UNREAD = 4 << 20
"""Bytes of unread hidden states of a sequence that drafts nothing; beyond, the head reads them."""
PIECES = 32
"""Tensors of a sequence before they are concatenated: freeing thousands in one step took 0.1 s."""


class Head(Protocol):
    width: int
    """Of the hidden states that it reads and writes."""
    aux_hidden_layers: tuple[int, ...]
    """The target's residual streams that it fuses, by the layer that they enter."""

    def combine_hidden_states(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Make what it reads of what the target gave: the last hidden states, and the aux streams."""
        ...

    def forward(self, window: Window, hidden_TD: Tensor, memory: Arena) -> Tensor:
        """Return the head's own hidden states for each token and the hidden state before it."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits of the target's tokens; minus infinity for those that it cannot draft."""
        ...


class Unroll(Protocol):
    """A head that goes on with its own guesses, each the best by a rule and the noise of its place."""

    def __call__(
        self, window: Window, memory: Arena, after_BD: Tensor, rules: Rules, seed_B: Tensor, levels: int
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and shares by level; `models.unrolled` has more."""
        ...


@dataclass(frozen=True, slots=True)
class Straight:
    """How chains are drafted in one pass, where a token is chosen by nothing but logits and place."""

    unrolled: Unroll
    takes: Callable[[Want], bool]
    """Tells of which sequences that is so."""
    rules: Callable[[Sequence[Want], torch.device], tuple[Rules, Tensor]]
    """Their rules and seeds."""


@dataclass(slots=True)
class Unread:
    """What the target has read and the head has not: hidden states from position `read` on."""

    read: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    count: int = 0

    def append(self, hidden_MD: Tensor) -> None:
        self.hidden.append(hidden_MD)
        self.count += hidden_MD.shape[0]
        if len(self.hidden) == PIECES:
            self.hidden = [torch.cat(self.hidden)]

    def take(self, count: int) -> Tensor:
        """Cut the first `count` hidden states off."""
        whole_MD = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden)
        self.hidden = [whole_MD[count:].clone()] if count < self.count else []
        self.count, self.read = self.count - count, self.read + count
        return whole_MD[:count]


@dataclass(slots=True, kw_only=True)
class HeadGrowth(Growth):
    """A draft that a head grows, which reads what it wrote itself: which nodes it has read."""

    root_D: Tensor
    """The hidden state that is read with the root token."""
    ran: list[int] = field(default_factory=lambda: [0])


class HeadDrafter:
    """Owns what each sequence's head has yet to read. `arena` holds the KV it writes.

    A step has the head read `chunk_tokens` of what is behind, all sequences together, or one token of each.
    """

    def __init__(
        self,
        head: Head,
        arena: Arena,
        rank: Rank,
        device: torch.device,
        chunk_tokens: int,
        *,
        window: int | None = None,
        straight: Straight | None = None,
    ) -> None:
        """Limit the head's attention to `window` tokens before what it reads at once; None: no limit."""
        self.head, self.arena, self.rank, self.device = head, arena, rank, device
        self.straight = straight
        self.chunk_tokens, self.window = chunk_tokens, window
        self.calibrator = Calibrator()
        self._unread: dict[RequestId, Unread] = {}

    def read(self, key: RequestId, hidden_MD: Tensor, *, whole: bool = False) -> None:
        """Take what the head fused of the next positions that a sequence has committed.

        Unless they are the `whole` of a step's they are copied: a view would keep all of those alive.
        """
        unread = self._unread.get(key) or self._unread.setdefault(key, Unread())
        unread.append(hidden_MD if whole else hidden_MD.clone())

    def num_unread(self, key: RequestId) -> int:
        """Return how many hidden states of a sequence wait to be read."""
        unread = self._unread.get(key)
        return unread.count if unread else 0

    def is_full(self, key: RequestId) -> bool:
        """Return whether a sequence's hidden states should be read even if no draft is wanted."""
        unread = self._unread.get(key)
        if not unread or not unread.count:
            return False
        return unread.count >= self.chunk_tokens or unread.count * unread.hidden[-1][0].nbytes > MOST_UNREAD

    @torch.inference_mode()
    def settle(self, wants: Sequence[Want], *, most: int) -> bool:
        """Read on where more than `most` hidden states wait, up to the last; tell if all are near now."""
        behind = [want for want in wants if self._unread[want.key].count > most]
        if behind:
            self._catch_up(behind, keep=1)
        return all(self._unread[want.key].count <= most for want in behind)

    def hand_over(self, key: RequestId) -> tuple[int, Tensor]:
        """Give up what is unread, for the device to read: from which position on, and the hidden states."""
        unread = self._unread.pop(key)
        start = unread.read
        return start, unread.take(unread.count)

    def restore(self, key: RequestId, start: int, hidden_MD: Tensor | None) -> None:
        """Take over again: all before position `start` has been read, and these hidden states wait."""
        self._unread[key] = Unread(read=start)
        if hidden_MD is not None:
            self.read(key, hidden_MD)

    def drop(self, key: RequestId, count: int) -> None:
        """Forget the last hidden states, of tokens that the sequence did not take."""
        unread = self._unread[key]
        whole_MD = unread.take(unread.count)
        unread.read -= len(whole_MD)
        self.read(key, whole_MD[:-count])

    def last(self, key: RequestId) -> Tensor:
        """Return the last hidden state that waits to be read."""
        return self._unread[key].hidden[-1][-1:].clone()

    def on_preempt(self, key: RequestId) -> None:
        """Drop what is unread: the head's KV cache went with the sequence's blocks."""
        self._unread.pop(key, None)

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None:
        """Forget a sequence."""
        self.on_preempt(key)

    def flush(self, caller: str | None = None) -> None:
        """Keep what is unread: a sequence that has ended left nothing."""

    def forget(self) -> None:
        """Forget every sequence."""
        self._unread.clear()

    @torch.inference_mode()
    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """Read what is new of each sequence, then grow all drafts: straight on or level by level."""
        last = self._catch_up(wants)
        grown = [
            self._begin(want, *at_root) if want.shape and at_root else None
            for want, at_root in zip(wants, last, strict=True)
        ]
        drafts = [growth for growth in grown if growth]
        if self.straight:
            self._go_straight(self.straight, drafts)
        growing = drafts
        while growing := [draft for draft in growing if draft.grower.frontier]:
            if growing[0].grower.depth > 0:
                self._run(growing)
            expand(growing, self.head.logits, self.rank)
        return [
            growth.grower.finish() if growth else Proposal.bare(want.tokens[-1])
            for want, growth in zip(wants, grown, strict=True)
        ]

    def _begin(self, want: Want, root_D: Tensor, after_D: Tensor) -> HeadGrowth:
        assert want.shape
        grower = Grower(want.tokens[-1], want.shape, self.calibrator)
        return HeadGrowth(want=want, grower=grower, after={0: after_D}, root_D=root_D)

    def _catch_up(self, wants: Sequence[Want], *, keep: int = 0) -> list[tuple[Tensor, Tensor] | None]:
        """Read each sequence up to its root; return the last hidden state read there and the head's own.

        Those that are nearest come first; of one that is too far behind a part is read, and it gets None. So
        does one of which the last `keep` hidden states are left to be read.
        """
        spare = self.chunk_tokens
        rows, inputs, reached = [], [], {}
        for i in sorted(range(len(wants)), key=lambda i: self._unread[wants[i].key].count):
            want, unread = wants[i], self._unread[wants[i].key]
            # What follows the last one may still be unknown, if that is left.
            assert unread.count and unread.read + unread.count - len(want.tokens) + 1 in (0, keep)
            count, start = min(unread.count - keep, max(spare, 1)), unread.read
            spare -= count
            rows.append(self._row(TokenTree.chain(want.tokens[start + 1 :][:count]), start, want))
            inputs.append(unread.take(count))
            if not unread.count:
                reached[i] = len(rows) - 1
        outputs = self._forward(rows, inputs)
        return [
            (inputs[reached[i]][-1], outputs[reached[i]][-1]) if i in reached else None
            for i in range(len(wants))
        ]

    def _go_straight(self, how: Straight, drafts: Sequence[HeadGrowth]) -> None:
        """Draft the chains of each depth in one pass, where logits and place alone choose their tokens."""
        chains = [own for own in drafts if own.grower.shape.topk == 1 and how.takes(own.want)]
        for levels in {chain.grower.shape.num_steps for chain in chains}:
            alike = [chain for chain in chains if chain.grower.shape.num_steps == levels]
            wants = [chain.want for chain in alike]
            rows = [
                self._row(TokenTree.chain(want.tokens[-1:]), len(want.tokens) - 1, want) for want in wants
            ]
            window = build_window(rows, 1, self.device)
            after_BD = torch.stack([chain.after[0] for chain in alike])
            asked = how.rules(wants, self.device)
            guesses = how.unrolled(window, self.arena, after_BD, *asked, levels)
            for chain, *guessed in zip(alike, *(part_BL.tolist() for part_BL in guesses), strict=True):
                for token, share in zip(*guessed, strict=True):
                    chain.grower.add(chain.grower.frontier[0], [token], [share])

    def _run(self, drafts: Sequence[HeadGrowth]) -> None:
        """Read each draft's frontier. A chain goes on where it ended; a tree is read again from its root."""
        rows, inputs, nodes = [], [], []
        for draft in drafts:
            grower, start = draft.grower, len(draft.want.tokens) - 2
            draft.ran += grower.frontier
            ran = draft.ran if draft.grower.shape.topk > 1 else draft.ran[-1:]
            place = {node: i for i, node in enumerate(ran)}
            tree = TokenTree(
                tuple(grower.tokens[node] for node in ran),
                tuple(-1 if i == 0 else place[grower.parents[node]] for i, node in enumerate(ran)),
            )
            skipped = len(draft.ran) - len(ran)
            rows.append(self._row(tree, start + skipped, draft.want))
            own = [draft.after[grower.parents[node]] if node else draft.root_D for node in ran]
            inputs.append(torch.stack(own))
            nodes.append(ran)
        for draft, ran, out_MD in zip(drafts, nodes, self._forward(rows, inputs), strict=True):
            draft.after.update(zip(ran, out_MD, strict=True))

    def _row(self, tree: TokenTree, start: int, want: Want) -> Row:
        """Give the head tokens at a position, and the blocks that it may look back to."""
        size = self.arena.layout.block_tokens
        first = 0 if self.window is None else max(start - self.window, 0) // size
        return Row(tree, start - first * size, want.table_N[first:], 0, skipped=first * size)

    def _forward(self, rows: Sequence[Row], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the head over rows and the hidden states they read; return its own, row by row."""
        window = build_window(rows, 1, self.device)
        hidden_TD = inputs[0]
        if len(rows) > 1:
            order = sorted(range(len(rows)), key=lambda i: window.first_B[i])
            hidden_TD = torch.cat([inputs[i] for i in order])
        out_TD = self.head.forward(window, hidden_TD, self.arena)
        return [out_TD[at : at + len(x)] for at, x in zip(window.first_B, inputs, strict=True)]
