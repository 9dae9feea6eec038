"""The prefix cache: KV blocks and states of earlier requests, for prompts with the same prefix."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from torch import Tensor

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.pinned import sent
from specdec.state_slots.prefix.integrity import prove
from specdec.state_slots.prefix.lease import PrefixHit, PrefixLease
from specdec.state_slots.prefix.tiers import Tier
from specdec.state_slots.prefix.tree import Ids, PrefixNode

Tokens = Sequence[int] | Ids

APART = 128
"""Minimum tokens between two guesses within a prompt: each adds a forward pass.

A pass takes as long as prefilling 26 more tokens (random 0.5b shape in bfloat16, one thread of a Xeon).
"""


class PrefixCache(Tier):
    """The tier that requests run in: it lends them prefixes and caches what they compute.

    States are cached where two prompts diverge, at lengths marked by a caller, and after the last token that
    a request computed. If memory allows, they are also cached speculatively (guesses): at the end of each
    chunk, after the first turn of a chat, and just before the end of the prompt.
    """

    def lease(
        self, tokens: Tokens, tenant: Tenant = SOLE, marks: Iterable[int] = (), turn_ends: Sequence[int] = ()
    ) -> PrefixLease:
        """Find the longest cached prefix of a prompt, and pin it until `lend` or `leave`.

        The last token is always computed: sampling needs its logits. `turns` are the lengths at which a
        chat's first and last turn end.
        """
        ids = as_ids(tokens[:-1])
        self.tree.root(tenant)
        deepest, matched = self.tree.walk(tenant, ids)
        found, length = self.usable(deepest, matched)
        store: Tier = self
        tip = found
        if self.lower and (hit := self.lower.longer_hit(tenant, ids, length, self.rates)):
            store, tip, (found, length) = self.lower, deepest, hit
        self.tree.pinned.append(tip)
        store.tree.pinned.append(found)
        private = max(min(length - (self.has_head and self._states), matched - self.has_head), 0)
        stops = {mark for mark in marks if length < mark <= len(tokens)}
        divergence = max(matched, self.lower.tree.walk(tenant, ids)[1] if self.lower else 0)
        if self._states and length < divergence:
            stops.add(divergence)
        shared = private // self.tree.size if self.tree.pages else 0
        guesses = self._guesses(length, len(tokens), turn_ends)
        return PrefixLease(
            tenant, tip, shared, length, tuple(sorted(stops)), store, found, len(tokens), guesses
        )

    def _guesses(self, length: int, count: int, turn_ends: Sequence[int]) -> tuple[int, ...]:
        """Return guess lengths: the ends of the first and (if close) last turn, and all but the last token.

        Lengths are at least `APART` apart. Returns none if a state would not get memory.
        """
        if not self._states or not (self.arena.has_free_state or self.guesses.next()):
            return ()
        ends = [turn for turn in turn_ends if turn < count]
        last = [end for end in ends[-1:] if count - end <= APART]
        chosen: list[int] = []
        for end in (*ends[:1], *last, count - 1):
            if end - (chosen[-1] if chosen else length) >= APART:
                chosen.append(end)
        return tuple(chosen)

    def lend(self, owner: Hashable, lease: PrefixLease, state: int | None) -> PrefixHit:
        """Give a request shared blocks, and copies of the state and of blocks that it will write."""
        length, store = lease.length, lease.store
        shared = self.tree.table(lease.node, lease.shared * self.tree.size)
        sources = store.tree.table(lease.found, length)[lease.shared :]
        for block in shared:
            self.arena.share_block(owner, block)
        copies = self.arena.take_blocks(owner, len(sources))
        assert copies is not None, "a lease's blocks were counted"
        states = []
        if length and self._states:
            assert lease.found.state is not None and state is not None
            states = [(lease.found.state, state)]
        self.rates.copy(store.arena, self.arena, list(zip(sources, copies, strict=True)), states)
        self._unpin(lease)
        lease.node.locks += 1
        lease.lent = True
        self._touch(lease.node)
        self.counts.asked += lease.asked
        self.counts.hit += length
        fetched = store is not self
        self.counts.fetched += length * fetched
        store._touch(lease.found)
        store.guesses.discard(lease.found)
        hidden_1D = sent(lease.found.hidden_1D, self.arena.data.device) if self._states else None
        return PrefixHit(length, [*shared, *copies], hidden_1D, fetched)

    def leave(self, lease: PrefixLease) -> None:
        """Release a lease's locks or pins."""
        if lease.lent:
            lease.node.locks -= 1
        else:
            self._unpin(lease)
        for tree, node in ((self.tree, lease.node), (lease.store.tree, lease.found)):
            tree.prune(node)

    def cut(self, lease: PrefixLease, length: int) -> None:
        """Remove a request's computed tokens beyond a length, and every prefix that continues them."""
        if self.tree.contains(lease.node):  # else it was removed with another's
            self.remove(lease.tenant, self.tree.token_ids(lease.node), length)

    def note(self, lease: PrefixLease, tokens: Tokens, table: Sequence[int]) -> PrefixNode:
        """Insert a request's computed prefix; the tree shares its blocks from now on."""
        node, matched = self._insert(lease.tenant, as_ids(tokens), list(table))
        if matched < len(tokens) and lease.extended_from is None:
            lease.extended_from = max(matched, lease.length)
        lease.node.locks -= 1
        node.locks += 1
        lease.node = node
        return node

    def longest(self, tenant: Tenant, tokens: Tokens) -> int:
        """Return the cached tokens of this prefix, in all tiers."""
        tiers = [self, self.lower] if self.lower else [self]
        return max(tier.usable(*tier.tree.walk(tenant, as_ids(tokens)))[1] for tier in tiers)

    def adopt(
        self,
        owner: Hashable,
        tenant: Tenant,
        tokens: Tokens,
        table: Sequence[int],
        state: int | None,
        hidden_1D: Tensor | None,
    ) -> None:
        """Insert a prefix that no request has computed; its blocks are shared, its state is moved."""
        node, _ = self._insert(tenant, as_ids(tokens), list(table))
        if state is not None:
            self.keep(node, owner, state, hidden_1D)

    def keep_copy(self, node: PrefixNode, state: int | None, hidden_1D: Tensor | None) -> None:
        """Cache a copy of a running request's state at a node, if memory is free."""
        self.guesses.discard(node)
        if state is None or node.state is not None:
            return
        self._copy_in(node, self, state, hidden_1D)

    def keep_chunk(
        self, lease: PrefixLease, node: PrefixNode, state: int | None, hidden_1D: Tensor | None
    ) -> None:
        """Cache a copy of the state at the end of a prompt's chunk.

        Unless requested it is a guess: it only takes free memory, or that of an older guess.
        """
        if node.end in lease.state_lengths:
            self.keep_copy(node, state, hidden_1D)
        elif node.end == lease.asked and any(node.end - guess <= APART for guess in lease.guesses):
            return  # a state just before the prompt's end serves more prompts
        elif state is not None and node.state is None and (self.arena.has_free_state or self._evict_guess()):
            self._copy_in(node, self, state, hidden_1D)
            if node.state is not None:
                self.guesses.add(node)

    def keep(self, node: PrefixNode, owner: Hashable, state: int, hidden_1D: Tensor | None) -> None:
        """Move a state that its owner no longer needs to the node, unless the node has one."""
        if node.state is None:
            self.arena.hand_over_state(owner, node, state)
            self._keep(node, state, hidden_1D)
        self.guesses.discard(node)

    def _unpin(self, lease: PrefixLease) -> None:
        self.tree.pinned.remove(lease.node)
        lease.store.tree.pinned.remove(lease.found)

    def check(self, leases: Iterable[PrefixLease] = (), others: Iterable[Hashable] = ()) -> None:
        """Check that each tree and its arena agree; `leases` and `others` are running requests."""
        trees = [self.tree] if self.lower is None else [self.tree, self.lower.tree]
        prove(trees, leases, others)


def as_ids(tokens: Tokens) -> Ids:
    return np.asarray(tokens, np.int32)
