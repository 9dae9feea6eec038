"""A tree finds inserted texts wherever they diverge, and its tables are those of their writers."""

from random import Random

import numpy as np
import pytest
import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout
from specdec.state_slots.prefix.tree import Ids, PrefixNode, PrefixTree
from tests.state_slots.prefix.naming import common, whole_of

SIZE = 4
LAYOUT = Layout((KVShape(1, 2),), (), torch.float32, block_tokens=SIZE)
OTHER = Tenant("bob", "own")


def ids(tokens: list[int]) -> Ids:
    return np.asarray(tokens, np.int32)


def plant(
    tree: PrefixTree, writer: str, text: list[int], tenant: Tenant = SOLE
) -> tuple[PrefixNode, list[int]]:
    """Insert a text into a tree with the blocks of a request that computed all of it."""
    table = tree.arena.take_blocks(writer, -(-len(text) // SIZE))
    assert table is not None
    tree.root(tenant)
    node, at = tree.walk(tenant, ids(text))
    node = tree.node_at(node, at)
    return (tree.grow(node, ids(text), table) if at < len(text) else node), table


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(Arena(LAYOUT, 40 * LAYOUT.slab_bytes, torch.device("cpu")))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("cut", range(13))
def test_texts_may_part_anywhere(tree: PrefixTree, length: int, cut: int) -> None:
    """The lower text's blocks begin at the end of the upper one; a split and a join are inverse."""
    cut = min(cut, length)
    first = list(range(1, length + 1))
    second = [*first[:cut], 0, 0, 0, 0, 0]
    a, table = plant(tree, "a", first)
    b, other = plant(tree, "b", second)
    assert (whole_of(a), whole_of(b)) == (first, second)
    assert tree.table(a, length) == table
    full = cut // SIZE
    assert tree.table(b, len(second)) == [*table[:full], *other[full:]]
    assert tree.walk(SOLE, ids([*second, 7])) == (b, len(second))
    assert tree.walk(SOLE, ids(first[:cut]))[1] == cut
    for count in range(1, length + 1):
        assert tree.table(a, count) == table[: -(-count // SIZE)]
    tree.drop(b)
    if 0 < cut < length:
        assert a.parent and not a.parent.is_root
        assert tree.join(a.parent) is a
    assert whole_of(a) == first and tree.table(a, length) == a.blocks == table


def test_a_text_grows_where_it_ended(tree: PrefixTree) -> None:
    """It grows by its writer's blocks; another writer's text becomes a child."""
    table = tree.arena.take_blocks("a", 3)
    assert table is not None
    text = list(range(10))
    node = tree.grow(tree.root(SOLE), ids(text[:5]), table)
    assert tree.grow(node, ids(text[:8]), table) is node and node.end == 8
    assert tree.grow(node, ids(text), table) is node and node.blocks == table
    child, other = plant(tree, "b", [*text, 1, 2, 3])
    assert child.parent is node and child.blocks == other[2:]
    assert tree.table(child, 13) == [*table[:2], *other[2:]]


def test_a_node_with_a_state_does_not_grow(tree: PrefixTree) -> None:
    table = tree.arena.take_blocks("a", 2)
    assert table is not None
    node = tree.grow(tree.root(SOLE), ids([1, 2, 3]), table)
    node.state = 1
    child = tree.grow(node, ids([1, 2, 3, 4, 5]), table)
    assert child.parent is node and (node.end, child.end) == (3, 5)


def test_random_texts_match_their_longest_inserted_prefix(tree: PrefixTree) -> None:
    random, known = Random(0), {tenant: list[list[int]]() for tenant in (SOLE, OTHER)}
    for turn in range(400):
        tenant = random.choice([SOLE, SOLE, OTHER])
        texts = known[tenant]
        stem = random.choice(texts) if texts and random.random() < 0.8 else []
        cut = random.randrange(len(stem) + 1)
        text = [*stem[:cut], *(random.randrange(3) for _ in range(random.randrange(1, 9)))][:30]
        expected = max((common(text, each) for each in texts), default=0)
        assert tree.walk(tenant, ids(text))[1] == expected
        if random.random() < 0.7:
            node, _ = plant(tree, f"writer {turn}", text, tenant)
            assert whole_of(node) == text and tree.walk(tenant, ids(text)) == (node, len(text))
            texts.append(text)
        tree.arena.release_owner(f"writer {turn}")
    tree.arena.check_owners(node for node in tree.nodes())


def test_a_tenant_is_forgotten_with_the_last_of_its_texts(tree: PrefixTree) -> None:
    tree.walk(Tenant(salt="asked for once"), ids([1]))
    assert not tree.roots
    node, _ = plant(tree, "a", [1, 2, 3], tenant=OTHER)
    other, _ = plant(tree, "b", [4], tenant=OTHER)
    tree.drop(node)
    assert list(tree.roots) == [OTHER]
    tree.drop(other)
    assert not tree.roots
