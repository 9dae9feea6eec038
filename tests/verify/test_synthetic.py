"""Synthetic acceptance: the mean length, each depth's rate, and one outcome for one seed."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.state_slots.tree import TokenTree
from specdec.verify.synthetic import accept_at_rates, rates_for
from specdec.verify.walk import walk

STEPS = 20_000


def said_by(
    rates: Sequence[float], tree: TokenTree, *, seed: int = 0, steps: int = STEPS
) -> list[tuple[int, ...]]:
    """Walk repeatedly, each step from the end of the last one; return the tokens each emitted."""
    position, said = 1, []
    for _ in range(steps):
        choices = range(100, 100 + len(tree))
        path = walk(*accept_at_rates(choices, tree, rates, seed=seed, position=position))
        said.append(path.emitted)
        position += len(path.emitted)
    return said


def mean_length(said: Sequence[Sequence[int]]) -> float:
    return sum(map(len, said)) / len(said)


@given(st.integers(1, 16), st.floats(0, 1))
def test_the_rate_gives_the_requested_length(num_steps: int, share: float) -> None:
    length = 1 + share * num_steps
    rates = rates_for(length, num_steps)
    assert len(rates) == num_steps and all(0 <= rate <= 1 for rate in rates)
    assert 1 + sum(accumulate(rates, lambda a, b: a * b)) == pytest.approx(length, abs=1e-9)


@pytest.mark.parametrize(("length", "num_steps"), [(1.0, 4), (1.7, 1), (2.5, 3), (3.3, 7), (5.0, 4)])
def test_a_request_reaches_that_length(length: float, num_steps: int) -> None:
    tree = TokenTree.chain(range(num_steps + 1))
    said = said_by(rates_for(length, num_steps), tree, seed=5)
    assert mean_length(said) == pytest.approx(length, abs=0.07)


def test_each_depth_is_followed_at_its_own_rate() -> None:
    rates = (0.9, 0.3, 0.8, 0.5)
    accepted = Counter(len(own) - 1 for own in said_by(rates, TokenTree.chain(range(5))))
    for depth, rate in enumerate(rates):
        reached = sum(count for length, count in accepted.items() if length >= depth)
        followed = sum(count for length, count in accepted.items() if length > depth)
        assert followed / reached == pytest.approx(rate, abs=0.02)


def test_rates_of_0_and_1_are_exact() -> None:
    tree = TokenTree.chain(range(4))
    assert set(map(len, said_by((1.0, 1.0, 1.0), tree))) == {4}
    assert set(map(len, said_by((1.0, 0.0, 1.0), tree))) == {2}
    assert set(map(len, said_by((0.0, 1.0, 1.0), tree))) == {1}


def test_a_seed_determines_the_outcome() -> None:
    tree, rates = TokenTree.chain(range(5)), (0.6,) * 4
    outcomes = {seed: tuple(map(len, said_by(rates, tree, seed=seed, steps=60))) for seed in range(-5, 20)}
    again = {seed: tuple(map(len, said_by(rates, tree, seed=seed, steps=60))) for seed in range(-5, 20)}
    assert outcomes == again
    assert len(set(outcomes.values())) == len(outcomes)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_seed_of_a_request_will_do(seed: int) -> None:
    said = said_by((0.5,), TokenTree.chain(range(2)), seed=seed, steps=1000)
    assert mean_length(said) == pytest.approx(1.5, abs=0.06)


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    tree, count = TokenTree.chain(range(2)), 2000
    drawn = [
        [
            len(walk(*accept_at_rates([1, 2], tree, (0.5,), seed=seed, position=p)).nodes) - 1
            for p in range(count)
        ]
        for seed in (7, 8)
    ]
    pairs = Counter(zip(*drawn, strict=True)) + Counter(zip(drawn[0], drawn[0][1:], strict=False))
    assert all(pairs[a, b] / pairs.total() == pytest.approx(0.25, abs=0.03) for a in (0, 1) for b in (0, 1))


#       0
#     1   2
#    3     4
TREE = TokenTree((9, 5, 6, 7, 8), (-1, 0, 0, 1, 2))


@pytest.mark.parametrize(
    ("rates", "nodes", "emitted"),
    [
        ((0.0, 1.0), (0,), (10,)),
        ((1.0, 0.0), (0, 1), (5, 11)),
        ((1.0, 1.0), (0, 1, 3), (5, 7, 13)),
        ((1.0, 1.0, 1.0, 1.0), (0, 1, 3), (5, 7, 13)),
        ((1.0,), (0, 1), (5, 11)),
        ((), (0,), (10,)),
    ],
)
def test_the_first_branch_is_followed_and_the_bonus_is_the_targets(
    rates: Sequence[float], nodes: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    """The target's choices at earlier nodes are ignored; its choice at the last one is emitted."""
    path = walk(*accept_at_rates([10, 11, 12, 13, 14], TREE, rates, seed=1, position=4))
    assert (path.nodes, path.emitted) == (nodes, emitted)
