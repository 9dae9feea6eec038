"""A radix tree of cached prefixes over token ids, and each node's slots.

A node is a prefix that may end at any token. Its edge covers the tokens between its parent's end and its own,
and it owns the KV blocks of these tokens. The block in which the parent ends belongs to both, shared or as
separate copies. With a draft head, whose keys at a token depend on the next one, the block of the parent's
last token does too. A node may have a recurrent state at its end.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.config.tenant import Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.slots import Evictable, Owner

Ids = NDArray[np.int32]
NO_IDS: Ids = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, repr=False)
class PrefixNode(Evictable):
    """One prefix. It is the owner of its slots in the arena."""

    tenant: Tenant
    parent: "PrefixNode | None"
    edge: Ids
    end: int
    blocks: list[int] = field(default_factory=list)
    """From the block in which the parent ends to the one in which it ends itself."""
    children: dict[int, "PrefixNode"] = field(default_factory=dict)
    """By the first token of their edges."""
    state: int | None = None
    hidden_1D: Tensor | None = None
    """Input of a draft head at the last token, once the next one is known."""
    used: int = 0
    """Last use by a request, on a clock that counts uses."""
    locks: int = 0
    """Requests that continue it and share its blocks: evicting it would free none of them."""

    def __repr__(self) -> str:
        return f"<the prefix of {self.end} tokens>"

    @property
    def start(self) -> int:
        return self.parent.end if self.parent else 0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def path(self) -> list["PrefixNode"]:
        """Return the nodes from below the root to this one."""
        nodes = []
        node = self
        while node.parent:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator["PrefixNode"]:
        """Yield this node and all below it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()


class PrefixTree:
    """The prefixes of each tenant, kept consistent with the arena's ownership."""

    def __init__(self, arena: Arena, *, has_head: bool = False) -> None:
        self.arena, self.size, self.before = arena, arena.layout.block_tokens, int(has_head)
        self.pages = bool(arena.layout.kv)
        self.roots: dict[Tenant, PrefixNode] = {}
        self.pinned: list[PrefixNode] = []
        """Nodes whose blocks and states a lease is about to copy, once per lease."""

    def root(self, tenant: Tenant) -> PrefixNode:
        """Return the root of a tenant's tree; create it if needed."""
        return self.roots.setdefault(tenant, PrefixNode(tenant, None, NO_IDS, 0))

    def prune(self, node: PrefixNode) -> None:
        """Remove a tenant without prefixes, unless a request holds its root."""
        is_used = node.children or node.locks or node in self.pinned
        if self.roots.get(node.tenant) is node and not is_used:
            del self.roots[node.tenant]

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield every node except the roots."""
        for root in self.roots.values():
            yield from (node for node in root.subtree() if not node.is_root)

    def walk(self, tenant: Tenant, ids: Ids) -> tuple[PrefixNode, int]:
        """Return the node on whose edge the longest cached prefix of these tokens ends, and its length.

        For a tenant without prefixes this is a root outside the tree.
        """
        node, matched = self.roots.get(tenant) or PrefixNode(tenant, None, NO_IDS, 0), 0
        while matched < len(ids) and (child := node.children.get(int(ids[matched]))):
            node = child
            length = common(child.edge, ids[matched:])
            matched += length
            if length < len(child.edge):
                break
        return node, matched

    def token_ids(self, node: PrefixNode) -> Ids:
        """Return a node's tokens from the root on."""
        return np.concatenate([NO_IDS, *(ancestor.edge for ancestor in node.path())])

    def first(self, start: int) -> int:
        """Return the table index of the first block of a node that starts at a token."""
        return max(start - self.before, 0) // self.size

    def table(self, node: PrefixNode, length: int) -> list[int]:
        """Return the blocks of a prefix that ends on a node's edge."""
        blocks: list[int] = []
        for ancestor in node.path() if self.pages else ():
            blocks[self.first(ancestor.start) :] = ancestor.blocks
        return blocks[: -(-length // self.size)]

    def node_at(self, node: PrefixNode, position: int) -> PrefixNode:
        """Return a node that ends at a position on a node's edge, splitting it if needed."""
        return node if position == node.end else self._split(node, position)

    def grow(self, node: PrefixNode, ids: Ids, table: list[int]) -> PrefixNode:
        """Extend a node: `ids` and `table` cover the whole prefix.

        A leaf without a state becomes longer; any other node gets a child.
        """
        end, edge = len(ids), ids[node.end :]
        first = self.first(node.end)
        blocks = table[first : -(-end // self.size)] if self.pages else []
        if self._may_grow(node, table):
            added = blocks[-(-node.end // self.size) - first :]
            self._hold(node, added)
            node.blocks += added
            node.edge, node.end = np.concatenate([node.edge, edge]), end
            return node
        child = PrefixNode(node.tenant, node, edge.copy(), end)
        child.blocks = blocks
        self._hold(child, blocks)
        node.children[int(edge[0])] = child
        return child

    def drop(self, node: PrefixNode) -> None:
        """Remove a leaf and release its slots."""
        assert node.parent and not node.children
        del node.parent.children[int(node.edge[0])]
        self.arena.release_owner(node)
        self.prune(node.parent)
        node.parent = None

    def contains(self, node: PrefixNode) -> bool:
        """Return whether a node is in the tree, not on a removed branch."""
        path = node.path()
        return all(
            ancestor.parent and ancestor.parent.children.get(int(ancestor.edge[0])) is ancestor
            for ancestor in path
        )

    def cut(self, node: PrefixNode) -> None:
        """Remove a node and all below it."""
        assert node.parent
        del node.parent.children[int(node.edge[0])]
        for descendant in node.subtree():
            self.arena.release_owner(descendant)
            descendant.state = descendant.hidden_1D = None

    def join(self, node: PrefixNode) -> PrefixNode:
        """Merge a node with one child and no state into that child, which inherits its blocks."""
        (child,) = node.children.values()
        assert node.parent and node.state is None
        shared = node.blocks[: self.first(child.start) - self.first(node.start)]
        self._hold(child, shared)
        child.blocks = shared + child.blocks
        self.arena.release_owner(node)
        child.edge = np.concatenate([node.edge, child.edge])
        node.parent.children[int(child.edge[0])] = child
        child.parent, node.parent = node.parent, None
        return child

    def _may_grow(self, node: PrefixNode, table: list[int]) -> bool:
        """Return whether a node is a leaf without a state, and `table` continues in its last block."""
        if node.is_root or node.children or node.state is not None:
            return False
        return not self.pages or table[(node.end - 1) // self.size] == node.blocks[-1]

    def _split(self, node: PrefixNode, position: int) -> PrefixNode:
        """Split an edge; return the new upper node. The lower part remains the original node."""
        parent = node.parent
        assert parent and node.start < position < node.end
        count = position - node.start
        upper = PrefixNode(node.tenant, parent, node.edge[:count].copy(), position)
        first = self.first(node.start)
        if self.pages:
            upper.blocks = node.blocks[: (position - 1) // self.size + 1 - first]
            self._hold(upper, upper.blocks)
            upper_only = node.blocks[: self.first(position) - first]
            node.blocks = node.blocks[len(upper_only) :]
            self.arena.release_blocks(node, upper_only)
        upper.used = node.used
        parent.children[int(upper.edge[0])] = upper
        node.edge, node.parent = node.edge[count:].copy(), upper
        upper.children[int(node.edge[0])] = node
        return upper

    def _hold(self, node: PrefixNode, blocks: list[int]) -> None:
        for block in blocks:
            self.arena.share_block(node, block)


def move_blocks(moved: Mapping[int, int], owners: Set[Owner]) -> None:
    """Update the block ids of owners that are nodes after blocks have moved."""
    for node in owners:
        if isinstance(node, PrefixNode):
            node.blocks = [moved.get(block, block) for block in node.blocks]


def common(edge: Ids, ids: Ids) -> int:
    """Return the length of two sequences' common prefix."""
    count = min(len(edge), len(ids))
    differ = np.flatnonzero(edge[:count] != ids[:count])
    return int(differ[0]) if len(differ) else count
