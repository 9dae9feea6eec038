"""What earlier requests have read, for later ones that begin alike: found, lent, kept, and given up again."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.pinned import sent
from specdec.state_slots.prefix.rates import Rates
from specdec.state_slots.prefix.score import Score
from specdec.state_slots.prefix.tree import Ids, Node, Tree

MOVING = "moving"
"""Owns, in the lower tier, what comes from the upper one."""
Tokens = Sequence[int] | Ids


@dataclass(slots=True)
class Lease:
    """One request's place in the tree, from its admission to its end."""

    tenant: Tenant
    tip: Node
    """The node that it goes on from, as far as blocks can be shared."""
    shared: int
    """Blocks that it need not take: those that it will never write."""
    length: int
    """Tokens that it need not read."""
    stops: tuple[int, ...]
    """Where it must pause while it reads its prompt, so that a state is kept there; rising."""
    store: "PrefixCache"
    found: Node
    """Who keeps the state at that length, and what else has to be copied, and at which node."""
    asked: int
    """Tokens that were looked up."""
    lent: bool = False
    own: int | None = None
    """Where what nobody knew before it begins; None: it has told nothing new."""

    def stop_at(self, length: int) -> None:
        """Have a state kept at one more length."""
        self.stops = tuple(sorted({*self.stops, length}))

    def until_stop(self, computed: int) -> int | None:
        """Count the tokens to the next place at which a state is to be kept."""
        return next((stop - computed for stop in self.stops if stop > computed), None)


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request begins with, all of it its own or shared by reference."""

    length: int
    blocks: Sequence[int]
    """Its first blocks, those that it must not write included: of these it is one owner more."""
    hidden_1D: Tensor | None
    fetched: bool
    """It came from the lower tier, and is not kept in this one."""


@dataclass(slots=True)
class Counts:
    """What came of it, in tokens of prompts, in nodes and in blocks."""

    asked: int = 0
    hit: int = 0
    fetched: int = 0
    """Tokens of those that the lower tier had kept."""
    states_kept: int = 0
    states_evicted: int = 0
    blocks_evicted: int = 0


class PrefixCache:
    """Owns the tree and what it holds of the arena, which it gives back when somebody is short of memory.

    A state is kept where two prompts have parted, where a caller has said so, and behind the last token of
    what a request has written: nothing in between will be asked for. What gives way goes to a lower tier, a
    cache over slower memory, if there is one. One thread owns a cache.
    """

    def __init__(
        self, arena: Arena, score: Score, *, has_head: bool, lower: "PrefixCache | None" = None
    ) -> None:
        self.arena, self.score, self.has_head, self.lower = arena, score, has_head, lower
        self.tree = Tree(arena, has_head=has_head)
        self.counts = Counts()
        self.rates: Rates = lower.rates if lower else Rates()
        self._states = bool(arena.layout.states)
        self._now = 0
        self._order: list[tuple[Node, int]] = []
        """Who gives way next, the first of them last, and when each had last been used."""
        arena.attach_evictor(self)

    def lease(self, tokens: Tokens, tenant: Tenant = SOLE, marks: Iterable[int] = ()) -> Lease:
        """Find what is known of a prompt, and keep it from giving way until `lend` or `leave`.

        The last token must be read in any case: what follows it is asked for.
        """
        ids = as_ids(tokens[:-1])
        self.tree.root(tenant)
        deepest, known = self.tree.walk(tenant, ids)
        found, length = self.usable(deepest, known)
        store, tip = self, found
        if self.lower and (below := self.lower.below(tenant, ids, length, self.rates)):
            store, tip, (found, length) = self.lower, deepest, below
        self.tree.pinned.append(tip)
        store.tree.pinned.append(found)
        private = max(min(length - (self.has_head and self._states), known - self.has_head), 0)
        stops = {mark for mark in marks if length < mark <= len(tokens)}
        parting = max(known, self.lower.tree.walk(tenant, ids)[1] if self.lower else 0)
        if self._states and length < parting:
            stops.add(parting)
        shared = private // self.tree.size if self.tree.pages else 0
        return Lease(tenant, tip, shared, length, tuple(sorted(stops)), store, found, len(tokens))

    def usable(self, node: Node, known: int) -> tuple[Node, int]:
        """Return the deepest prefix that can be gone on from, on the way to a node."""
        if not self._states:
            # A head has to read the last token's hidden state, which only reading that token gives.
            return node, max(known - self.has_head, 0)
        if node.end > known:
            assert node.parent
            node = node.parent
        while node.parent and node.state is None:
            node = node.parent
        return node, node.end

    def below(self, tenant: Tenant, ids: Ids, length: int, rates: "Rates") -> tuple[Node, int] | None:
        """Return what this tier knows beyond a length, if to copy it takes less time than to read it."""
        found, deeper = self.usable(*self.tree.walk(tenant, ids))
        if deeper <= length:
            return None
        layout, work = self.arena.layout, self.score.work
        copied = layout.state_bytes + layout.blocks_for(deeper - length) * layout.block_bytes
        return (found, deeper) if rates.pays(copied, work(deeper) - work(length)) else None

    def lend(self, owner: Hashable, lease: Lease, state: int | None) -> Hit:
        """Let a request share the blocks before its next token, and copy its state and what it will write."""
        length, store = lease.length, lease.store
        shared = self.tree.table(lease.tip, lease.shared * self.tree.size)
        sources = store.tree.table(lease.found, length)[lease.shared :]
        for block in shared:
            self.arena.share_block(owner, block)
        copies = self.arena.take_blocks(owner, len(sources))
        assert copies is not None, "a lease's blocks were counted"
        there, here = store.arena, self.arena
        with self.rates.copying(there, here) as pairs:
            for source, own in zip(sources, copies, strict=True):
                pairs.append((there.block_bytes_X(source), here.block_bytes_X(own)))
            if length and self._states:
                assert lease.found.state is not None and state is not None
                pairs.append((there.state_bytes_X(lease.found.state), here.state_bytes_X(state)))
        self._unpin(lease)
        lease.tip.locks += 1
        lease.lent = True
        self._touch(lease.tip)
        self.counts.asked += lease.asked
        self.counts.hit += length
        fetched = store is not self
        self.counts.fetched += length * fetched
        store._touch(lease.found)
        hidden_1D = sent(lease.found.hidden_1D, self.arena.data.device) if self._states else None
        return Hit(length, [*shared, *copies], hidden_1D, fetched)

    def leave(self, lease: Lease) -> None:
        """Let a place go."""
        if lease.lent:
            lease.tip.locks -= 1
        else:
            self._unpin(lease)
        for tree, node in ((self.tree, lease.tip), (lease.store.tree, lease.found)):
            tree.prune(node)

    def cut(self, lease: Lease, since: int) -> None:
        """Forget what a request has read beyond a length, and all that has come to stand on it."""
        if self.tree.holds(lease.tip):  # else it went with another's
            self._cut(lease.tenant, self.tree.spelled(lease.tip), since)

    def _cut(self, tenant: Tenant, ids: Ids, since: int) -> None:
        deepest, _ = self.tree.walk(tenant, ids)
        node = next((node for node in deepest.path() if node.end > since), None)
        if node:
            if node.start < since:
                self.tree.reach(node, since)
            self.tree.cut(node)
        if self.lower:
            self.lower._cut(tenant, ids, since)

    def note(self, lease: Lease, tokens: Tokens, table: Sequence[int]) -> Node:
        """Learn what a request has read so far; its blocks are the tree's as well from now on."""
        node, known = self._insert(lease.tenant, as_ids(tokens), list(table))
        if known < len(tokens) and lease.own is None:
            lease.own = max(known, lease.length)
        lease.tip.locks -= 1
        node.locks += 1
        lease.tip = node
        return node

    def _insert(self, tenant: Tenant, ids: Ids, table: list[int]) -> tuple[Node, int]:
        """Return the node that stands for a prefix, and how much of it was known before."""
        self.tree.root(tenant)
        node, at = self.tree.walk(tenant, ids)
        node = self.tree.reach(node, at)
        if at < len(ids):
            node = self.tree.grow(node, ids, table)
        self._touch(node)
        return node, at

    def _unpin(self, lease: Lease) -> None:
        self.tree.pinned.remove(lease.tip)
        lease.store.tree.pinned.remove(lease.found)

    def pinned(self) -> tuple[set[int], set[int]]:
        """Return the blocks and states that are kept and do not give way now."""
        blocks = {block for node in self.tree.pinned for block in self.tree.table(node, node.end)}
        return blocks, {node.state for node in self.tree.pinned if node.state is not None}

    def keep_copy(self, node: Node, state: int | None, hidden_1D: Tensor | None) -> None:
        """Keep a copy of a state, which goes on, at a node, if there is room for it."""
        if state is None or node.state is not None:
            return
        self._copy_in(node, self, state, hidden_1D)

    def keep(self, node: Node, owner: Hashable, state: int, hidden_1D: Tensor | None) -> None:
        """Take a state over, which its owner needs no more, unless the node has one."""
        if node.state is None:
            self.arena.hand_over_state(owner, node, state)
            self._keep(node, state, hidden_1D)

    def _copy_in(self, node: Node, store: "PrefixCache", state: int, hidden_1D: Tensor | None) -> None:
        self.tree.pinned.append(node)  # room is made for it, but not by itself
        slots = self.arena.take_snapshots(node, 1)
        self.tree.pinned.remove(node)
        if slots:
            with self.rates.copying(store.arena, self.arena) as pairs:
                pairs.append((store.arena.state_bytes_X(state), self.arena.state_bytes_X(slots[0])))
            self._keep(node, slots[0], hidden_1D)

    def _keep(self, node: Node, state: int, hidden_1D: Tensor | None) -> None:
        node.state, node.hidden_1D = state, hidden_1D
        self.counts.states_kept += 1

    def take_over(self, upper: "PrefixCache", node: Node) -> None:
        """Keep what the tier above gives up at a node, as far as there is room."""
        tenant, ids = node.tenant, upper.tree.spelled(node)
        deepest, known = self.tree.walk(tenant, ids)
        self.tree.pinned.append(deepest)
        first = self.tree.first(known) if self.tree.pages else 0
        sources = upper.tree.table(node, node.end)[first:]
        blocks = self.arena.take_blocks(MOVING, len(sources))
        if blocks is not None:
            table = [*self.tree.table(deepest, known)[:first], *blocks]
            self._copy_down(upper, sources, blocks)
            own, _ = self._insert(tenant, ids, table)
            self.arena.release_owner(MOVING)
            if node.state is not None and own.state is None:
                hidden_1D = sent(node.hidden_1D, self.arena.data.device)
                self._copy_in(own, upper, node.state, hidden_1D)
        self.tree.pinned.remove(deepest)
        self.tree.prune(deepest)

    def _copy_down(self, upper: "PrefixCache", sources: Sequence[int], blocks: Sequence[int]) -> None:
        with self.rates.copying(upper.arena, self.arena) as pairs:
            for source, to in zip(sources, blocks, strict=True):
                pairs.append((upper.arena.block_bytes_X(source), self.arena.block_bytes_X(to)))

    def make_room(self, fits: Callable[[], bool]) -> bool:
        """Give prefixes up until something fits; tell whether it does."""
        while not fits():
            node = self._next() or self._next(anew=True)
            if node is None:
                return False
            self._give_up(node)
        return True

    def _next(self, *, anew: bool = False) -> Node | None:
        """Return who gives way first, in an order that is good for an eighth of those who stood in it.

        What one gives up changes little for the others, and who has been used since would stand behind them.
        """
        if anew:
            kept = list(self.tree.nodes())
            order = self.score.order(self.score.of_largest([n for n in kept if self._may_go(n)], kept))
            self._order = [(node, node.used) for node in order[len(order) // 8 :: -1]]
        while self._order:
            node, used = self._order.pop()
            if node.used == used and self._may_go(node) and self.tree.holds(node):
                return node
        return None

    def flush(self, caller: str | None = None) -> None:
        """Evict all that no request goes on from; where a caller is named, only what its requests left."""
        if self.lower:
            self.lower.flush(caller)
        lower, self.lower = self.lower, None
        while going := [node for node in self.tree.nodes() if self._may_go(node, caller)]:
            for node in going:
                if self._may_go(node, caller) and self.tree.holds(node):
                    self._give_up(node)
        self.lower = lower

    def forget(self) -> None:
        """Begin afresh after the arena has taken everything back."""
        self.tree.roots.clear()
        self._order.clear()
        self.tree.pinned.clear()
        if self.lower:
            self.lower.arena.forget()
            self.lower.forget()

    def _may_go(self, node: Node, caller: str | None = None) -> bool:
        """Tell whether a node would give anything: its state, or all of it, if nothing hangs on it."""
        if caller is not None and node.tenant.caller != caller:
            return False
        if node.is_root or len(node.children) > 1 or node in self.tree.pinned:
            return False
        return node.state is not None or not (node.children or node.locks)

    def _give_up(self, node: Node) -> None:
        """Take a node's state, and the node too if nothing hangs on it; its child takes its blocks over."""
        if self.lower and (node.state is not None or not self._states):
            self.lower.take_over(self, node)
        if node.state is not None:
            self.arena.release_state(node, node.state)
            node.state = node.hidden_1D = None
            self.counts.states_evicted += 1
        parent = node.parent
        assert parent
        if node.locks or node in self.tree.pinned:
            return
        if node.children:
            self.tree.join(node)
            return
        self.counts.blocks_evicted += len(node.blocks)
        self.tree.drop(node)
        if parent.is_root or parent.state is not None or not self._states:
            return
        if parent.locks or parent in self.tree.pinned:
            return
        if len(parent.children) == 1:
            self.tree.join(parent)
        elif not parent.children:
            self._give_up(parent)

    def _touch(self, node: Node) -> None:
        self._now += 1
        node.used = self._now

    def check(self, leases: Iterable[Lease] = (), others: Iterable[Hashable] = ()) -> None:
        """Prove that the trees hold of their arenas what they say, and nobody but these others anything.

        `leases` are those that go on: nothing else may keep a node from giving way.
        """
        self._check_books(others)
        nodes = self._whole()
        if self.lower:
            self.lower._check_books()
            nodes += self.lower._whole()
        pinned = self.tree.pinned + (self.lower.tree.pinned if self.lower else [])
        _check_leases(nodes, pinned, [lease for lease in leases if self.tree.holds(lease.tip)])

    def _whole(self) -> list[Node]:
        return [*self.tree.nodes(), *self.tree.roots.values()]

    def _check_books(self, others: Iterable[Hashable] = ()) -> None:
        nodes = list(self.tree.nodes())
        for node in nodes:
            assert node.parent
            size, first = self.tree.size, self.tree.first(node.start)
            count = -(-node.end // size) - first if self.tree.pages else 0
            if len(node.edge) != node.end - node.start or not len(node.edge) or len(node.blocks) != count:
                raise IntegrityError(f"the prefix of {node.end} tokens holds {len(node.blocks)} blocks")
            if node.parent.children.get(int(node.edge[0])) is not node:
                raise IntegrityError(f"the prefix of {node.end} tokens is not known to its parent")
            self.arena.check_held(node, node.blocks, [] if node.state is None else [node.state])
        self.arena.check_owners([*others, *nodes])


def _check_leases(nodes: Sequence[Node], pinned: Sequence[Node], leases: Sequence[Lease]) -> None:
    """Prove that each lock and pin is a lease's, and that those go on from what is in a tree."""
    locks = Counter(lease.tip for lease in leases if lease.lent)
    pins = Counter(node for lease in leases if not lease.lent for node in (lease.tip, lease.found))
    if pins != Counter(pinned):
        raise IntegrityError(f"somebody is about to copy {pinned}, but no request is")
    for node in nodes:
        if node.locks != locks.pop(node, 0):
            raise IntegrityError(f"the prefix of {node.end} tokens has {node.locks} locks")
    if locks or not pins.keys() <= set(nodes):
        raise IntegrityError("a request goes on from a prefix that is not in the tree")


def as_ids(tokens: Tokens) -> Ids:
    return np.asarray(tokens, np.int32)
