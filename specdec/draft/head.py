"""Draft with a head over the target's hidden states: a multi-token head, applied to its own output.

The head has its own KV cache in the sequence's blocks. At position p its input is the target's hidden state
there and the next token; after the last committed token its input is its own output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest
from specdec.draft.grow import Grower
from specdec.draft.levels import DraftGrowth, Rank, expand
from specdec.draft.proposal import DraftShape, Proposal
from specdec.kernels.sampling.rules import Rules
from specdec.state_slots.arena import Arena
from specdec.state_slots.slots import RequestId
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, Window, build_window

MOST_UNREAD = 4 << 20
"""Maximum bytes of pending hidden states of a sequence that drafts nothing; beyond, the head runs on them."""
PIECES = 32
"""Tensors per sequence before they are concatenated: freeing thousands in one step took 0.1 s."""


class DraftHead(Protocol):
    width: int
    """Size of the hidden states, input and output."""
    aux_hidden_layers: tuple[int, ...]
    """Layers of the target whose input residual streams are fused into the head's input."""

    @property
    def block(self) -> int | None:
        """Return the tokens of the pass that drafts all levels (see `draft.block`); None: it is recursive."""
        ...

    def combine_hidden_states(self, hidden_TD: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Fuse the target's last hidden states and aux streams into the head's input."""
        ...

    def forward(self, window: Window, hidden_TD: Tensor, memory: Arena) -> Tensor:
        """Return the head's hidden states, one per token, from the preceding hidden state and that token."""
        ...

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits over the target's vocabulary; minus infinity for tokens the head cannot draft."""
        ...


class UnrolledDraft(Protocol):
    """Unrolled chain drafting: each next token is chosen by logits, rules and position-dependent noise."""

    def __call__(
        self, window: Window, memory: Arena, after_BD: Tensor, rules: Rules, seed_B: Tensor, levels: int
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and probabilities by level; see `models.unrolled`."""
        ...


@dataclass(frozen=True, slots=True)
class UnrolledDrafting:
    """Drafting of whole chains in one pass, for rows whose tokens depend on logits and position only."""

    unrolled: UnrolledDraft
    takes: Callable[[DraftRequest], bool]
    """Return whether a row can be drafted this way."""
    rules: Callable[[Sequence[DraftRequest], torch.device], tuple[Rules, Tensor]]
    """Return the rows' sampling rules and seeds."""


@dataclass(slots=True)
class PendingHiddenStates:
    """Hidden states from position `read` on that the head has not yet processed."""

    read: int = 0
    hidden: list[Tensor] = field(default_factory=list)
    count: int = 0

    def append(self, hidden_MD: Tensor) -> None:
        self.hidden.append(hidden_MD)
        self.count += hidden_MD.shape[0]
        if len(self.hidden) == PIECES:
            self.hidden = [torch.cat(self.hidden)]

    def take(self, count: int) -> Tensor:
        """Remove and return the first `count` hidden states."""
        whole_MD = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden)
        self.hidden = [whole_MD[count:].clone()] if count < self.count else []
        self.count, self.read = self.count - count, self.read + count
        return whole_MD[:count]


@dataclass(slots=True, kw_only=True)
class HeadGrowth(DraftGrowth):
    """A head's draft while it grows; inputs below the root are the head's own outputs."""

    root_D: Tensor
    """Input hidden state of the root token."""
    ran: list[int] = field(default_factory=lambda: [0])


class HeadDrafter:
    """Draft with a head. Owns each sequence's pending hidden states; `arena` holds the head's KV cache.

    Each step catches up on at most `chunk_tokens` pending tokens over all sequences, but at least one of
    each.
    """

    def __init__(
        self,
        head: DraftHead,
        arena: Arena,
        rank: Rank,
        device: torch.device,
        chunk_tokens: int,
        *,
        window: int | None = None,
        straight: UnrolledDrafting | None = None,
    ) -> None:
        """Limit the head's attention to the last `window` tokens; None: no limit."""
        self.head, self.arena, self.rank, self.device = head, arena, rank, device
        self.straight = straight
        self.chunk_tokens, self.window = chunk_tokens, window
        self.calibrator = Calibrator()
        self._unread: dict[RequestId, PendingHiddenStates] = {}

    def read(self, key: RequestId, hidden_MD: Tensor, *, whole: bool = False) -> None:
        """Append fused hidden states of a sequence's next committed positions.

        They are copied unless they are the `whole` tensor of the step, since a view would keep that tensor
        alive.
        """
        unread = self._unread.get(key) or self._unread.setdefault(key, PendingHiddenStates())
        unread.append(hidden_MD if whole else hidden_MD.clone())

    def num_unread(self, key: RequestId) -> int:
        """Return the number of pending hidden states of a sequence."""
        unread = self._unread.get(key)
        return unread.count if unread else 0

    def is_full(self, key: RequestId) -> bool:
        """Return whether the head should catch up even if no draft is wanted."""
        unread = self._unread.get(key)
        if not unread or not unread.count:
            return False
        return unread.count >= self.chunk_tokens or unread.count * unread.hidden[-1][0].nbytes > MOST_UNREAD

    @torch.inference_mode()
    def catch_up_to(self, requests: Sequence[DraftRequest], *, most: int) -> bool:
        """Catch up sequences with more than `most` pending hidden states; return whether all fit now.

        The last hidden state of each stays pending.
        """
        lagging = [request for request in requests if self._unread[request.key].count > most]
        if lagging:
            self._catch_up(lagging, keep=1)
        return all(self._unread[request.key].count <= most for request in lagging)

    def take_pending(self, key: RequestId) -> tuple[int, Tensor]:
        """Remove and return the first pending position and the hidden states, for the device to process."""
        unread = self._unread.pop(key)
        start = unread.read
        return start, unread.take(unread.count)

    def restore(self, key: RequestId, start: int, hidden_MD: Tensor | None) -> None:
        """Resume a sequence whose head has processed all before `start`; `hidden_MD` is pending."""
        self._unread[key] = PendingHiddenStates(read=start)
        if hidden_MD is not None:
            self.read(key, hidden_MD)

    def drop(self, key: RequestId, count: int) -> None:
        """Drop the last `count` hidden states, of tokens the sequence did not accept."""
        unread = self._unread[key]
        whole_MD = unread.take(unread.count)
        unread.read -= len(whole_MD)
        self.read(key, whole_MD[: len(whole_MD) - count])

    def last(self, key: RequestId) -> Tensor:
        """Return a copy of the last pending hidden state."""
        return self._unread[key].hidden[-1][-1:].clone()

    def on_preempt(self, key: RequestId) -> None:
        """Drop pending hidden states: the head's KV cache was freed with the sequence's blocks."""
        self._unread.pop(key, None)

    def end(
        self, key: RequestId, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant
    ) -> None:
        """Drop a sequence."""
        self.on_preempt(key)

    def flush(self, caller: str | None = None) -> None:
        """Do nothing: finished sequences leave no data."""

    def forget(self) -> None:
        """Drop all sequences."""
        self._unread.clear()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Catch up every sequence, then grow all drafts, in one pass where possible, else level by level."""
        last = self._catch_up(requests)
        grown = [
            self._begin(request, *at_root) if request.shape and at_root else None
            for request, at_root in zip(requests, last, strict=True)
        ]
        drafts = [growth for growth in grown if growth]
        self._grow(drafts)
        return [
            growth.grower.finish() if growth else Proposal.bare(request.tokens[-1])
            for request, growth in zip(requests, grown, strict=True)
        ]

    def written(self, shape: DraftShape) -> int:
        """Return the KV positions behind the accepted ones that drafting this shape may write."""
        return self.head.block or shape.topk * shape.num_steps

    def _grow(self, drafts: Sequence[HeadGrowth]) -> None:
        if self.straight:
            self._go_straight(self.straight, drafts)
        growing = drafts
        while growing := [draft for draft in growing if draft.grower.frontier]:
            if growing[0].grower.depth > 0:
                self._run(growing)
            expand(growing, self.head.logits, self.rank)

    def _begin(self, request: DraftRequest, root_D: Tensor, after_D: Tensor) -> HeadGrowth:
        assert request.shape
        grower = Grower(request.tokens[-1], request.shape, self.calibrator)
        return HeadGrowth(want=request, grower=grower, after={0: after_D}, root_D=root_D)

    def _catch_up(
        self, requests: Sequence[DraftRequest], *, keep: int = 0
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Catch up each sequence to its root; return the root's input hidden state and the head's output.

        Sequences with the fewest pending tokens go first. The result is None for a sequence that could only
        be processed in part, or whose last `keep` hidden states are left pending.
        """
        spare = self.chunk_tokens
        rows, inputs, reached = [], [], {}
        for i in sorted(range(len(requests)), key=lambda i: self._unread[requests[i].key].count):
            request, unread = requests[i], self._unread[requests[i].key]
            # With `keep`, the token after the last hidden state may not be known yet.
            assert unread.count and unread.read + unread.count - len(request.tokens) + 1 in (0, keep)
            count, start = min(unread.count - keep, max(spare, 1)), unread.read
            spare -= count
            rows.append(self._row(TokenTree.chain(request.tokens[start + 1 :][:count]), start, request))
            inputs.append(unread.take(count))
            if not unread.count:
                reached[i] = len(rows) - 1
        outputs = self._forward(rows, inputs)
        return [
            (inputs[reached[i]][-1], outputs[reached[i]][-1]) if i in reached else None
            for i in range(len(requests))
        ]

    def _go_straight(self, unrolled: UnrolledDrafting, drafts: Sequence[HeadGrowth]) -> None:
        """Draft the chains of each depth in one pass, for rows that `how.takes`."""
        chains = [chain for chain in drafts if chain.grower.shape.topk == 1 and unrolled.takes(chain.want)]
        for levels in {chain.grower.shape.num_steps for chain in chains}:
            group = [chain for chain in chains if chain.grower.shape.num_steps == levels]
            requests = [chain.want for chain in group]
            rows = [
                self._row(TokenTree.chain(request.tokens[-1:]), len(request.tokens) - 1, request)
                for request in requests
            ]
            window = build_window(rows, 1, self.device)
            after_BD = torch.stack([chain.after[0] for chain in group])
            sampling = unrolled.rules(requests, self.device)
            guesses = unrolled.unrolled(window, self.arena, after_BD, *sampling, levels)
            for chain, *guessed in zip(group, *(part_BL.tolist() for part_BL in guesses), strict=True):
                for token, share in zip(*guessed, strict=True):
                    chain.grower.add(chain.grower.frontier[0], [token], [share])

    def _run(self, drafts: Sequence[HeadGrowth]) -> None:
        """Run the head on each draft's frontier: the last token of a chain, all nodes of a tree."""
        rows, inputs, nodes = [], [], []
        for draft in drafts:
            grower, start = draft.grower, len(draft.want.tokens) - 2
            draft.ran += grower.frontier
            ran = draft.ran if draft.grower.shape.topk > 1 else draft.ran[-1:]
            index = {node: i for i, node in enumerate(ran)}
            tree = TokenTree(
                tuple(grower.tokens[node] for node in ran),
                tuple(-1 if i == 0 else index[grower.parents[node]] for i, node in enumerate(ran)),
            )
            skipped = len(draft.ran) - len(ran)
            rows.append(self._row(tree, start + skipped, draft.want))
            hidden = [draft.after[grower.parents[node]] if node else draft.root_D for node in ran]
            inputs.append(torch.stack(hidden))
            nodes.append(ran)
        for draft, ran, out_MD in zip(drafts, nodes, self._forward(rows, inputs), strict=True):
            draft.after.update(zip(ran, out_MD, strict=True))

    def _row(self, tree: TokenTree, start: int, request: DraftRequest) -> Row:
        """Build a window row of tokens at a position, with the blocks inside the attention window."""
        size = self.arena.layout.block_tokens
        first = 0 if self.window is None else max(start - self.window, 0) // size
        return Row(tree, start - first * size, request.table_N[first:], 0, skipped=first * size)

    def _forward(self, rows: Sequence[Row], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the head over rows and their input hidden states; return its hidden states, row by row."""
        window = build_window(rows, 1, self.device)
        hidden_TD = inputs[0]
        if len(rows) > 1:
            order = sorted(range(len(rows)), key=lambda i: window.first_B[i])
            hidden_TD = torch.cat([inputs[i] for i in order])
        out_TD = self.head.forward(window, hidden_TD, self.arena)
        return [out_TD[at : at + len(x)] for at, x in zip(window.first_B, inputs, strict=True)]
