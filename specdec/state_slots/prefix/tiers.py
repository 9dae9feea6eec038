"""One tier of the prefix cache: a tree over an arena, its eviction, and the tier below.

A GPU's memory may be above the host's: evicted prefixes are copied down while memory lasts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.pinned import sent
from specdec.state_slots.prefix.rates import TierRates
from specdec.state_slots.prefix.score import Score
from specdec.state_slots.prefix.tree import Ids, PrefixNode, PrefixTree
from specdec.state_slots.prefix.unused_states import UnusedStates

MOVING = "moving"
"""The lower tier's owner of blocks that are being copied into it."""


@dataclass(slots=True)
class TierCounts:
    """Totals since the start, in prompt tokens, nodes and blocks."""

    asked: int = 0
    hit: int = 0
    fetched: int = 0
    """Hit tokens from the lower tier."""
    states_cached: int = 0
    states_evicted: int = 0
    blocks_evicted: int = 0


class Tier:
    """A tree and its slots of an arena, which evicts when the arena is short of memory.

    One thread owns a tier.
    """

    def __init__(self, arena: Arena, score: Score, *, has_head: bool, lower: "Tier | None" = None) -> None:
        self.arena, self.score, self.has_head, self.lower = arena, score, has_head, lower
        self.tree = PrefixTree(arena, has_head=has_head)
        self.counts = TierCounts()
        self.rates: TierRates = lower.rates if lower else TierRates()
        self._states = bool(arena.layout.states)
        self._now = 0
        self.guesses = UnusedStates()
        """Evicted before all other nodes, and never copied to the lower tier."""
        self._order: list[tuple[PrefixNode, int]] = []
        """Nodes to evict, the next one last, each with its `used` when the order was made."""
        arena.attach_evictor(self)

    def usable(self, node: PrefixNode, matched: int) -> tuple[PrefixNode, int]:
        """Return the longest prefix on a node's path that a request can continue, and its length."""
        if not self._states:
            # A draft head needs the last token's hidden state, which requires a forward pass of that token.
            return node, max(matched - self.has_head, 0)
        if node.end > matched:
            assert node.parent
            node = node.parent
        while node.parent and node.state is None:
            node = node.parent
        return node, node.end

    def longer_hit(
        self, tenant: Tenant, ids: Ids, length: int, rates: TierRates
    ) -> tuple[PrefixNode, int] | None:
        """Return a longer cache hit than `length`, if copying it takes less time than prefilling it."""
        node, cached = self.usable(*self.tree.walk(tenant, ids))
        if cached <= length:
            return None
        layout, work = self.arena.layout, self.score.work
        num_bytes = layout.state_bytes + layout.blocks_for(cached - length) * layout.block_bytes
        return (node, cached) if rates.pays(num_bytes, work(cached) - work(length)) else None

    def _insert(self, tenant: Tenant, ids: Ids, table: list[int]) -> tuple[PrefixNode, int]:
        """Return the node of a prefix, created if needed, and how many of its tokens were cached before."""
        self.tree.root(tenant)
        node, matched = self.tree.walk(tenant, ids)
        node = self.tree.node_at(node, matched)
        if matched < len(ids):
            node = self.tree.grow(node, ids, table)
        self._touch(node)
        return node, matched

    def remove(self, tenant: Tenant, ids: Ids, length: int) -> None:
        """Remove the part of a prefix beyond a length, and every prefix that continues it, in all tiers."""
        deepest, _ = self.tree.walk(tenant, ids)
        node = next((node for node in deepest.path() if node.end > length), None)
        if node:
            if node.start < length:
                self.tree.node_at(node, length)
            for child in node.subtree():
                self.guesses.discard(child)
            self.tree.cut(node)
        if self.lower:
            self.lower.remove(tenant, ids, length)

    def pinned(self) -> tuple[set[int], set[int]]:
        """Return the cached blocks and states that cannot be evicted now."""
        blocks = {block for node in self.tree.pinned for block in self.tree.table(node, node.end)}
        return blocks, {node.state for node in self.tree.pinned if node.state is not None}

    def take_over(self, upper: "Tier", node: PrefixNode) -> None:
        """Copy a node that the tier above evicts, as far as memory allows."""
        tenant, ids = node.tenant, upper.tree.token_ids(node)
        last, matched = self.tree.walk(tenant, ids)
        self.tree.pinned.append(last)
        first = self.tree.first(matched) if self.tree.pages else 0
        sources = upper.tree.table(node, node.end)[first:]
        blocks = self.arena.take_blocks(MOVING, len(sources))
        if blocks is not None:
            table = [*self.tree.table(last, matched)[:first], *blocks]
            self._copy_down(upper, sources, blocks)
            inserted, _ = self._insert(tenant, ids, table)
            self.arena.release_owner(MOVING)
            if node.state is not None and inserted.state is None:
                hidden_1D = sent(node.hidden_1D, self.arena.data.device)
                self._copy_in(inserted, upper, node.state, hidden_1D)
        self.tree.pinned.remove(last)
        self.tree.prune(last)

    def _copy_down(self, upper: "Tier", sources: Sequence[int], blocks: Sequence[int]) -> None:
        self.rates.copy(upper.arena, self.arena, list(zip(sources, blocks, strict=True)))

    def _copy_in(self, node: PrefixNode, store: "Tier", state: int, hidden_1D: Tensor | None) -> None:
        self.tree.pinned.append(node)  # freeing memory for its state must not evict the node itself
        slots = self.arena.take_snapshots(node, 1)
        self.tree.pinned.remove(node)
        if slots:
            self.rates.copy(store.arena, self.arena, states=[(state, slots[0])])
            self._keep(node, slots[0], hidden_1D)

    def _keep(self, node: PrefixNode, state: int, hidden_1D: Tensor | None) -> None:
        node.state, node.hidden_1D = state, hidden_1D
        self.counts.states_cached += 1

    def make_room(self, fits: Callable[[], bool]) -> bool:
        """Evict prefixes until `fits()`; return whether it does."""
        while not fits():
            if self._evict_guess():
                continue
            node = self._next() or self._next(restart=True)
            if node is None:
                return False
            self._evict(node)
        return True

    def _evict_guess(self) -> bool:
        """Evict the next guess; return whether there was one.

        A node that cannot be evicted now is about to be used, or has become a fork: it is no longer a guess.
        """
        while node := self.guesses.next():
            if self._is_evictable(node):
                self._evict(node)
                return True
            self.guesses.discard(node)
        return False

    def _next(self, *, restart: bool = False) -> PrefixNode | None:
        """Return the node to evict next; one order is used for an eighth of its candidates.

        One eviction changes little in the others' scores, and nodes used since then are skipped.
        """
        if restart:
            nodes = list(self.tree.nodes())
            order = self.score.order(
                self.score.of_largest([n for n in nodes if self._is_evictable(n)], nodes)
            )
            self._order = [(node, node.used) for node in order[len(order) // 8 :: -1]]
        while self._order:
            node, used = self._order.pop()
            if node.used == used and self._is_evictable(node) and self.tree.contains(node):
                return node
        return None

    def flush(self, caller: str | None = None) -> None:
        """Evict every unlocked prefix in all tiers, of one caller if given."""
        if self.lower:
            self.lower.flush(caller)
        lower, self.lower = self.lower, None
        self.move_down(caller)
        self.lower = lower

    def move_down(self, caller: str | None = None) -> None:
        """Evict every unlocked prefix to the tier below, if there is one."""
        while evictable := [node for node in self.tree.nodes() if self._is_evictable(node, caller)]:
            for node in evictable:
                if self._is_evictable(node, caller) and self.tree.contains(node):
                    self._evict(node)

    def forget(self) -> None:
        """Drop every prefix after the arena has freed all memory."""
        self.tree.roots.clear()
        self._order.clear()
        self.guesses.clear()
        self.tree.pinned.clear()
        if self.lower:
            self.lower.arena.forget()
            self.lower.forget()

    def _is_evictable(self, node: PrefixNode, caller: str | None = None) -> bool:
        """Return whether evicting a node frees anything: its state, or all of it if it is a leaf."""
        if caller is not None and node.tenant.caller != caller:
            return False
        if node.is_root or len(node.children) > 1 or node in self.tree.pinned:
            return False
        return node.state is not None or not (node.children or node.locks)

    def _evict(self, node: PrefixNode) -> None:
        """Free a node's state, and the node itself if it is a leaf; an only child inherits its blocks."""
        is_guess = self.guesses.discard(node)
        if self.lower and not is_guess and (node.state is not None or not self._states):
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
            self._evict(parent)

    def _touch(self, node: PrefixNode) -> None:
        self._now += 1
        node.used = self._now
