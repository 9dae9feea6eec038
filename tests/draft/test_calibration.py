"""Calibrated scores match the observed rates, whatever the beliefs, and are always probabilities."""

from collections import defaultdict
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.calibration import HIGHEST, LOWEST, AssumedRates, Calibrator
from specdec.draft.grow import Grower
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree
from tests.draft.naive import proposals

SHAPE = DraftShape(num_steps=3, topk=2, num_draft_tokens=9)


def draft(random: Random, calibrator: Calibrator) -> Proposal:
    """Grow a tree with new random beliefs at each node."""
    grower = Grower(0, SHAPE, calibrator)
    while grower.frontier:
        for node in grower.frontier:
            first = random.uniform(0.5, 0.9)
            grower.add(node, [0, 1], [first, (1 - first) * random.uniform(0.5, 1.0)])
    return grower.finish()


def accept(random: Random, proposal: Proposal, bias: dict[tuple[int, int], float]) -> tuple[int, ...]:
    """Draw the accepted path: a node's probability is its belief times the bias of its depth and rank."""
    ranks, depths = proposal.ranks, proposal.tree.depths
    path = [0]
    while True:
        draw = random.random()
        for node, parent in enumerate(proposal.tree.parents):
            if parent == path[-1]:
                draw -= proposal.beliefs[node] * bias[depths[node], ranks[node]]
                if draw < 0:
                    path.append(node)
                    break
        else:
            return tuple(path[1:])


def test_scores_become_the_rates_that_are_observed() -> None:
    """A drafter overconfident at first and underconfident deeper, its second choices worst."""
    bias = {(1, 0): 0.6, (1, 1): 0.9, (2, 0): 0.8, (2, 1): 0.5, (3, 0): 1.1, (3, 1): 0.3}
    random, calibrator = Random(1), Calibrator()
    predicted: defaultdict[tuple[int, int], float] = defaultdict(float)
    observed: defaultdict[tuple[int, int], int] = defaultdict(int)
    expected = accepted = 0.0
    for step in range(24000):
        proposal = draft(random, calibrator)
        nodes = accept(random, proposal, bias)
        if step >= 4000:
            expected += sum(proposal.scores[1:])
            accepted += len(nodes)
            places = list(zip(proposal.tree.depths, proposal.ranks, strict=True))
            for node, place in list(enumerate(places))[1:]:
                predicted[place] += proposal.scores[node]
                observed[place] += node in nodes
        calibrator.observe(proposal, nodes)
    assert expected == pytest.approx(accepted, rel=0.02)
    assert len(predicted) == len(bias)
    for place, count in observed.items():
        assert predicted[place] == pytest.approx(count, rel=0.05, abs=30), place


def test_without_observations_beliefs_stay() -> None:
    calibrator = Calibrator()
    assert calibrator.siblings([0.4], 1) == [0.4]
    assert calibrator.siblings([0.5, 0.3], 2) == [0.5, 0.3]


def test_few_observations_weigh_against_the_prior() -> None:
    calibrator = Calibrator(prior=24, memory=1e9)
    for _ in range(24):
        calibrator.observe(Proposal.chain(0, [1], [0.8]), ())
    assert calibrator.siblings([0.8], 1) == pytest.approx([0.4])


def test_what_is_long_past_is_forgotten() -> None:
    calibrator = Calibrator(memory=100)
    for accepted, rate in (((), 0.1), ((1,), 0.9)):
        for _ in range(1000):
            calibrator.observe(Proposal.chain(0, [1], [0.5]), accepted)
        assert calibrator.siblings([0.5], 1) == pytest.approx([rate], abs=0.1)
        assert calibrator.tallies[0][0].seen <= 100


def test_only_nodes_whose_parent_was_accepted_count() -> None:
    calibrator = Calibrator()
    tree = TokenTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 2))
    calibrator.observe(Proposal(tree, (1.0, 0.6, 0.3, 0.5, 0.2)), accepted_nodes=(2,))
    seen = [[tally.seen for tally in row[:3]] for row in calibrator.tallies[:2]]
    assert seen == [[1, 1, 0], [1, 0, 0]]
    assert calibrator.tallies[0][1].accepted == 1 and calibrator.tallies[1][0].accepted == 0


def test_places_beyond_the_caps_share_the_last() -> None:
    calibrator = Calibrator(max_depth=2, max_rank=2)
    wide = Proposal(TokenTree((9, 0, 1, 2, 3), (-1, 0, 0, 0, 0)), (1.0, 0.4, 0.3, 0.2, 0.1))
    calibrator.observe(wide, ())
    calibrator.observe(Proposal.chain(0, [1, 2, 3, 4], [0.9] * 4), (1, 2, 3, 4))
    assert [[tally.seen > 0 for tally in row] for row in calibrator.tallies] == [[True, True], [True, False]]
    first, *later = calibrator.siblings([0.1] * 9, 9)
    assert [first, *later[:1]] == calibrator.siblings([0.1] * 2, 2) and len(set(later)) == 1


@given(
    st.lists(st.tuples(proposals(), st.integers(0, 11)), max_size=30),
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_probabilities_stay_within_bounds_and_in_order(
    history: list[tuple[Proposal, int]], beliefs: list[float], depth: int
) -> None:
    calibrator = Calibrator(memory=10)
    for proposal, last in history:
        if last < proposal.num_drafted:
            calibrator.observe(proposal, proposal.tree.path(last + 1))
    assert all(LOWEST <= calibrator.siblings([belief], depth)[0] <= HIGHEST for belief in beliefs)
    siblings = calibrator.siblings(sorted(beliefs, reverse=True), depth)
    assert all(0 < chance < 1 for chance in siblings) and sum(siblings) <= 1 + 1e-9
    assert siblings == sorted(siblings, reverse=True)


def test_assumed_rates_keep_the_first_branch_whole() -> None:
    grower = Grower(0, DraftShape(3, 4, 6), AssumedRates((0.9, 0.8)))
    while grower.frontier:
        for node in grower.frontier:
            grower.add(node, [4, 3, 2, 1], [0.3, 0.3, 0.2, 0.1])
    proposal = grower.finish()
    assert len(proposal.tree.follow([4, 4, 4])) > 1 and proposal.scores[1] == pytest.approx(0.9)
    assert max(proposal.tree.depths) >= 2 and proposal.num_drafted == 5
    assert sum(proposal.scores[1:]) == pytest.approx(0.9 + 0.9 * 0.8)
