"""Proposals are trees; their best part is a tree, and merging neither loses nor duplicates a path."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.proposal import DraftShape, Proposal, merge
from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import walk
from tests.draft.naive import paths, proposals

FORK = Proposal(TokenTree((9, 5, 6, 7, 8), (-1, 0, 0, 2, 2)), scores=(1.0, 0.3, 0.6, 0.1, 0.5))


def test_a_proposal_knows_its_ranks_and_worth() -> None:
    assert FORK.ranks == (0, 1, 0, 1, 0)
    assert FORK.num_drafted == 4 and Proposal.bare(9).num_drafted == 0


def test_a_chain_hangs_each_token_on_the_one_before() -> None:
    chain = Proposal.chain(2, [3, 4, 5], [0.9, 0.5, 0.5])
    assert chain.tree.is_chain and chain.tree.tokens == (2, 3, 4, 5)
    assert Proposal.chain(2, [], []) == Proposal.bare(2)


def test_equal_siblings_rank_in_their_order() -> None:
    assert Proposal(TokenTree((0, 1, 2, 3), (-1, 0, 0, 0)), (1.0, 0.5, 0.5, 0.6)).ranks == (0, 1, 2, 0)


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "beliefs"),
    [
        pytest.param((0, 1), (-1, 0, 0), (1.0, 0.5), (), id="lengths differ"),
        pytest.param((0, 1, 2), (-1, 0, 2), (1.0, 0.5, 0.5), (), id="a node is its own parent"),
        pytest.param((0, 1, 2), (-1, 0, -1), (1.0, 0.5, 0.5), (), id="two roots"),
        pytest.param((0, 1, 2), (-1, 0, 1), (1.0, 0.5, 0.6), (), id="a child above its parent"),
        pytest.param((0,), (-1,), (0.9,), (), id="a root that is not certain"),
        pytest.param((0, 1), (-1, 0), (1.0, 1.1), (), id="a score above 1"),
        pytest.param((0, 1), (-1, 0), (1.0, -0.1), (), id="a score below 0"),
        pytest.param((0, 1), (-1, 0), (1.0, float("nan")), (), id="a score that is no number"),
        pytest.param((0, 1, 1), (-1, 0, 0), (1.0, 0.5, 0.2), (), id="siblings of one token"),
        pytest.param((0, 1, 2), (-1, 0, 1), (1.0, 0.5, 0.2), (1.0, 0.5), id="beliefs of some"),
    ],
)
def test_what_is_no_proposal_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], scores: tuple[float, ...], beliefs: tuple[float, ...]
) -> None:
    with pytest.raises(AssertionError):
        Proposal(TokenTree(tokens, parents), scores, beliefs)


@given(proposals(), st.integers(0, 14))
def test_the_best_are_the_highest_scores_with_their_parents(proposal: Proposal, limit: int) -> None:
    best, size = proposal.best(limit), len(proposal.tree)
    assert len(best.tree) == min(max(limit, 1), size)
    assert sorted(best.scores) == sorted(proposal.scores)[size - len(best.tree) :]
    # Equal paths show that the right parents were kept.
    every = paths(proposal)
    kept = [every.index(path) for path in paths(best)]
    assert kept == sorted(kept), "the order changed"
    assert [proposal.scores[node] for node in kept] == list(best.scores)
    worst = min(best.scores)
    left = [node for node in range(size) if node not in kept and proposal.scores[node] == worst]
    ties = [node for node in kept if proposal.scores[node] == worst]
    assert not ties or not left or max(ties) < min(left), "of equals the earlier is better"


def test_the_best_keep_their_beliefs() -> None:
    tree = TokenTree((0, 1, 2, 3), (-1, 0, 0, 2))
    proposal = Proposal(tree, (1.0, 0.2, 0.7, 0.3), (1.0, 0.1, 0.8, 0.4))
    assert proposal.best(3) == Proposal(TokenTree.chain((0, 2, 3)), (1.0, 0.7, 0.3), (1.0, 0.8, 0.4))


@given(proposals(), st.lists(st.integers(0, 3), max_size=8))
def test_following_a_text_passes_the_nodes_that_the_walk_accepts(
    proposal: Proposal, chosen: list[int]
) -> None:
    tree = proposal.tree
    after = {depth: token for depth, token in enumerate(chosen)}
    path = walk([after.get(depth, 99) for depth in tree.depths], tree)
    assert tree.follow(path.emitted) == path.nodes


@given(st.lists(proposals(), max_size=4), st.integers(0, 20))
def test_merging_shares_what_is_common_and_keeps_the_best(several: list[Proposal], limit: int) -> None:
    scores: dict[tuple[int, ...], float] = {}
    for proposal in several:
        for path, score in zip(paths(proposal), proposal.scores, strict=True):
            scores[path] = max(score, scores.get(path, 0.0))
    scores.setdefault((), 1.0)
    merged = merge(0, several, limit)
    found = paths(merged)
    assert len(found) == len(set(found)) == min(max(limit, 1), len(scores))
    assert [scores[path] for path in found] == list(merged.scores)
    assert sorted(merged.scores) == sorted(scores.values())[len(scores) - len(found) :]
    assert all(path[:-1] in found for path in found if path)


def test_merging_chains_makes_a_fork_where_they_part() -> None:
    chains = [Proposal.chain(7, [1, 2, 3], [0.9, 0.4, 0.3]), Proposal.chain(7, [1, 5], [0.6, 0.5])]
    fork = TokenTree((7, 1, 2, 3, 5), (-1, 0, 1, 2, 1))
    assert merge(7, chains) == merge(7, chains, 5) == Proposal(fork, (1.0, 0.9, 0.4, 0.3, 0.5))
    assert merge(7, chains, 3) == Proposal.chain(7, (1, 5), (0.9, 0.5))
    assert merge(7, [], 3) == Proposal.bare(7)


@given(st.lists(st.floats(0, 1), max_size=30))
def test_a_product_of_probabilities_never_rises(chances: list[float]) -> None:
    """Scores never increase from parent to child, even with rounding."""
    Proposal.chain(0, range(len(chances)), list(accumulate(chances, lambda a, b: a * b)))


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 0, 2), (1, 1, 0)])
def test_a_shape_drafts_something_and_verifies_the_root(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        DraftShape(*numbers)
