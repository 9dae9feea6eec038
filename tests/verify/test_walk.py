"""The walk down a tree, against a search over all of its paths."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import AcceptedPath, walk

#       0          the root
#     1   2        drafts for the next position: 5 and 6
#    3 4   5       7 and 8 below the first, 7 below the second
#    6             9
TREE = TokenTree((3, 5, 6, 7, 8, 7, 9), (-1, 0, 0, 1, 1, 2, 3))


@pytest.mark.parametrize(
    ("chosen", "nodes", "emitted"),
    [
        ([4, 0, 0, 0, 0, 0, 0], (0,), (4,)),
        ([5, 4, 0, 0, 0, 0, 0], (0, 1), (5, 4)),
        ([5, 8, 0, 0, 2, 0, 0], (0, 1, 4), (5, 8, 2)),
        ([5, 7, 0, 9, 0, 0, 1], (0, 1, 3, 6), (5, 7, 9, 1)),
        ([6, 0, 7, 0, 0, 4, 0], (0, 2, 5), (6, 7, 4)),
        # 7 is also a child of other nodes, and the root's own token is a child of none.
        ([7, 7, 7, 7, 7, 7, 7], (0,), (7,)),
        ([3, 3, 3, 3, 3, 3, 3], (0,), (3,)),
    ],
)
def test_walk_follows_the_chosen_tokens(
    chosen: list[int], nodes: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    assert walk(chosen, TREE) == AcceptedPath(nodes, emitted)


def test_walk_of_a_lone_root_emits_its_choice() -> None:
    assert walk([9], TokenTree((3,), (-1,))) == AcceptedPath((0,), (9,))


def test_walk_accepts_a_whole_chain() -> None:
    assert walk([1, 2, 3, 4], TokenTree.chain((0, 1, 2, 3))) == AcceptedPath((0, 1, 2, 3), (1, 2, 3, 4))


def draw_tree(rng: random.Random) -> TokenTree:
    """Draw a tree over few tokens, in which siblings differ."""
    tokens, parents = [0], [-1]
    for _ in range(rng.randrange(12)):
        entry = rng.randrange(4), rng.randrange(len(tokens))
        if entry not in zip(tokens, parents, strict=True):
            tokens.append(entry[0])
            parents.append(entry[1])
    return TokenTree(tuple(tokens), tuple(parents))


def longest_agreeing_path(chosen: list[int], tree: TokenTree) -> tuple[int, ...]:
    """Return the longest path whose every token is its parent's choice, by trying all paths."""
    agreeing = [
        path
        for path in map(tree.path, range(len(tree)))
        if all(chosen[tree.parents[node]] == tree.tokens[node] for node in path[1:])
    ]
    return max(agreeing, key=len)


@given(st.randoms(use_true_random=False))
@settings(deadline=None)
def test_walk_finds_the_longest_agreeing_path(rng: random.Random) -> None:
    tree = draw_tree(rng)
    chosen = [rng.randrange(4) for _ in tree.tokens]
    path = walk(chosen, tree)
    assert path.nodes == longest_agreeing_path(chosen, tree)
    assert path.emitted == (*(tree.tokens[node] for node in path.nodes[1:]), chosen[path.nodes[-1]])


def test_a_walk_with_a_swapped_parent_is_caught() -> None:
    """The same tokens under a wrong parent: in some of a few hundred trees the paths differ."""
    rng, caught = random.Random(0), 0
    for _ in range(300):
        tree = draw_tree(rng)
        chosen = [rng.randrange(4) for _ in tree.tokens]
        swapped = TokenTree(tree.tokens, (*tree.parents[:1], *(max(p - 1, 0) for p in tree.parents[1:])))
        caught += walk(chosen, swapped).nodes != longest_agreeing_path(chosen, tree)
    assert caught > 10
