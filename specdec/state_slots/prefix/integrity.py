"""Check that prefix trees agree with their arenas, and that requests own every lock and pin."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.prefix.lease import PrefixLease
from specdec.state_slots.prefix.tree import PrefixNode, PrefixTree


def prove(trees: Sequence[PrefixTree], leases: Iterable[PrefixLease], others: Iterable[Hashable]) -> None:
    """Check that trees own their slots; in the upper arena only `others` own any besides.

    `leases` are those of running requests: nothing else may lock or pin a node.
    """
    upper, *lower = trees
    _check_tree(upper, others)
    for tree in lower:
        _check_tree(tree)
    nodes = [node for tree in trees for node in (*tree.nodes(), *tree.roots.values())]
    pinned = [node for tree in trees for node in tree.pinned]
    _check_leases(nodes, pinned, [lease for lease in leases if upper.contains(lease.node)])


def _check_tree(tree: PrefixTree, others: Iterable[Hashable] = ()) -> None:
    nodes = list(tree.nodes())
    for node in nodes:
        assert node.parent
        count = -(-node.end // tree.size) - tree.first(node.start) if tree.pages else 0
        if len(node.edge) != node.end - node.start or not len(node.edge) or len(node.blocks) != count:
            raise IntegrityError(f"the prefix of {node.end} tokens holds {len(node.blocks)} blocks")
        if node.parent.children.get(int(node.edge[0])) is not node:
            raise IntegrityError(f"the prefix of {node.end} tokens is missing from its parent's children")
        tree.arena.check_held(node, node.blocks, [] if node.state is None else [node.state])
    tree.arena.check_owners([*others, *nodes])


def _check_leases(
    nodes: Sequence[PrefixNode], pinned: Sequence[PrefixNode], leases: Sequence[PrefixLease]
) -> None:
    """Check that each lock and pin belongs to a lease, and that leases refer to nodes of a tree."""
    locks = Counter(lease.node for lease in leases if lease.lent)
    pins = Counter(node for lease in leases if not lease.lent for node in (lease.node, lease.found))
    if pins != Counter(pinned):
        raise IntegrityError(f"{pinned} are pinned, but by no lease")
    for node in nodes:
        if node.locks != locks.pop(node, 0):
            raise IntegrityError(f"the prefix of {node.end} tokens has {node.locks} locks")
    if locks or not pins.keys() <= set(nodes):
        raise IntegrityError("a request holds a prefix that is not in the tree")
