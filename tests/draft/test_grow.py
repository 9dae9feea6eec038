"""A tree grown level by level equals EAGLE-2's choice from the full set of candidates."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.calibration import Calibrator
from specdec.draft.grow import Grower
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree
from tests.draft.naive import paths, shapes

VOCABULARY = 6


def say(path: tuple[int, ...], seed: int, topk: int) -> tuple[list[int], list[float]]:
    """Stand in for a model: the ranked tokens after a path and their probabilities, which often tie."""
    random = Random(f"{seed} {path}")
    weights = [random.choice((1, 2, 4, 8)) for _ in range(VOCABULARY)]
    ranked = sorted(range(VOCABULARY), key=lambda token: (-weights[token], token))[:topk]
    return ranked, [weights[token] / sum(weights) for token in ranked]


def grow(shape: DraftShape, seed: int, calibrator: Calibrator | None = None) -> Proposal:
    grower = Grower(0, shape, calibrator)
    while grower.frontier:
        for node in grower.frontier:
            path = path_to(grower, node)
            assert len(path) == grower.depth
            grower.add(node, *say(path, seed, shape.topk))
    return grower.finish()


def path_to(grower: Grower, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*path_to(grower, grower.parents[node]), grower.tokens[node])


def by_brute_force(shape: DraftShape, seed: int) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return EAGLE-2's choice: all candidates, sorted by score."""
    level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    every: list[tuple[tuple[int, ...], float]] = []
    for _ in range(shape.num_steps):
        level = [
            ((*path, token), score * chance)
            for path, score in sorted(level, key=lambda node: -node[1])[: shape.topk]
            for token, chance in zip(*say(path, seed, shape.topk), strict=True)
        ]
        every += level
    kept = sorted(every, key=lambda node: -node[1])[: shape.num_draft_tokens - 1]
    return [path for path, _ in kept], [score for _, score in kept]


@given(shapes(), st.integers(0, 1000))
def test_growing_keeps_the_best_of_the_full_set_of_candidates(shape: DraftShape, seed: int) -> None:
    grown = grow(shape, seed)
    best, scores = by_brute_force(shape, seed)
    assert sorted(paths(grown)[1:]) == sorted(best)
    assert sorted(grown.scores[1:], reverse=True) == scores


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1000))
def test_one_child_per_node_makes_a_chain(num_steps: int, num_draft_tokens: int, seed: int) -> None:
    grown = grow(DraftShape(num_steps, 1, num_draft_tokens), seed)
    assert grown.tree.is_chain
    assert grown.num_drafted == min(num_steps, num_draft_tokens - 1)


def test_growing_makes_as_many_candidates_as_the_configuration_counts() -> None:
    shape = DraftShape(num_steps=4, topk=3, num_draft_tokens=100)
    assert grow(shape, 0).num_drafted == shape.topk + shape.topk**2 * (shape.num_steps - 1)


def test_nodes_of_a_level_may_come_in_any_order() -> None:
    def grown(order: Sequence[int]) -> set[tuple[tuple[int, ...], float]]:
        grower = Grower(9, DraftShape(2, 2, 5))
        grower.add(0, [1, 2], [0.6, 0.3])
        for i in order:
            grower.add(grower.frontier[i], [3 + i, 5], [0.5, 0.2])
        proposal = grower.finish()
        return set(zip(paths(proposal), proposal.scores, strict=True))

    assert grown([0, 1]) == grown([1, 0])


def test_a_node_is_told_once_and_only_on_the_frontier() -> None:
    grower = Grower(9, DraftShape(3, 2, 8))
    grower.add(0, [1, 2, 3], [0.5, 0.3, 0.2])
    assert grower.tokens == [9, 1, 2], "children beyond topk are left out"
    grower.add(1, [4], [1.0])
    for node in (1, 3, 0):
        with pytest.raises(KeyError):
            grower.add(node, [5], [0.5])


@pytest.mark.parametrize("chances", [[0.2, 0.5], [1.1], [-0.1], [float("nan")]])
def test_chances_that_are_none_or_out_of_order_are_refused(chances: list[float]) -> None:
    with pytest.raises(AssertionError):
        Grower(9, DraftShape(1, 2, 3)).add(0, list(range(len(chances))), chances)


def test_a_level_without_children_ends_the_tree() -> None:
    grower = Grower(9, DraftShape(3, 2, 8))
    grower.add(0, [], [])
    assert grower.frontier == [] and grower.finish().num_drafted == 0


def test_finishing_early_keeps_what_there_is() -> None:
    grower = Grower(9, DraftShape(5, 1, 9))
    grower.add(0, [4], [0.5])
    assert grower.finish() == Proposal(TokenTree.chain((9, 4)), (1.0, 0.5), (1.0, 0.5))


def test_a_calibrator_sets_the_scores_and_not_the_beliefs() -> None:
    calibrator = Calibrator()
    shape = DraftShape(2, 2, 7)
    for _ in range(500):
        calibrator.observe(grow(shape, 3), ())
    plain, calibrated = grow(shape, 3), grow(shape, 3, calibrator)
    assert paths(calibrated) == paths(plain) and calibrated.beliefs == plain.beliefs
    assert max(calibrated.scores[1:]) < 0.1 * min(plain.scores[1:3])
