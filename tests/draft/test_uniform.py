"""The choice of one shape per batch: it finds what pays, re-explores, and otherwise loses little."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from specdec.draft.acceptance import TrackRecord
from specdec.draft.proposal import DraftShape
from specdec.draft.uniform import TRIES, WARM, UniformPolicy

TREE = DraftShape(3, 4, 8)
Cost = Callable[[DraftShape | None], float]


def run(
    policy: UniformPolicy, rows: int, steps: int, rate: float, cost: Cost, seed: int = 0
) -> tuple[float, Counter]:
    """Simulate steps with given costs and one rate at every depth; return seconds per token."""
    rng, tracks = Random(seed), [TrackRecord() for _ in range(rows)]
    seconds, tokens, chosen, before = 0.0, 0, Counter[DraftShape | None](), None
    for _ in range(steps):
        shape = policy.choose(tracks)
        chosen[shape] += 1
        took_s = cost(shape)
        if shape == before:
            policy.observe(shape, rows, took_s)
        seconds, tokens, as_drafted, before = seconds + took_s, tokens + rows, shape == before, shape
        for track in tracks:
            depth = 0
            while shape and as_drafted and depth < shape.num_steps and rng.random() < rate:
                depth += 1
            tokens += depth
            if shape and as_drafted:
                track.observe(shape, shape.num_steps, depth)
    return seconds / tokens, chosen


def bound_by_weights(shape: DraftShape | None) -> float:
    return 1.0 + (0.1 * shape.num_steps + 0.02 * shape.num_draft_tokens if shape else 0.0)


def bound_by_work(shape: DraftShape | None) -> float:
    return float(shape.num_draft_tokens) if shape else 1.0


def test_what_is_often_accepted_is_drafted_deep() -> None:
    per_token, chosen = run(UniformPolicy(TREE, adaptive=True), 4, 2000, 0.9, bound_by_weights)
    assert chosen.most_common(1)[0][0] in (TREE, DraftShape(3, 1, 4))
    assert per_token < 1 / 2.2


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_where_nothing_pays_little_is_lost(rows: int) -> None:
    for rate, cost in ((0.02, bound_by_weights), (0.6, bound_by_work)):
        per_token, chosen = run(UniformPolicy(TREE, adaptive=True), rows, 4000, rate, cost)
        assert chosen.most_common(1)[0][0] is None
        assert per_token < 1.04


def test_a_shape_that_has_become_cheap_is_found_again() -> None:
    policy = UniformPolicy(TREE, adaptive=True)
    run(policy, 2, 500, 0.9, bound_by_work)
    _, chosen = run(policy, 2, 3000, 0.9, bound_by_weights)
    assert chosen[None] < 1500


def test_batches_of_other_sizes_are_learnt_apart() -> None:
    policy = UniformPolicy(TREE, adaptive=True)
    run(policy, 1, 500, 0.8, bound_by_weights)
    _, many = run(policy, 64, 500, 0.8, bound_by_work)
    _, one = run(policy, 1, 500, 0.8, bound_by_weights)
    assert many.most_common(1)[0][0] is None and one.most_common(1)[0][0] is not None


def test_without_adapting_it_is_always_the_bounds() -> None:
    assert UniformPolicy(TREE, adaptive=False).choose([TrackRecord()]) == TREE
    assert UniformPolicy(TREE, adaptive=False).shapes == (TREE,)
    undrafted = UniformPolicy(None, adaptive=True)
    assert undrafted.choose([TrackRecord()]) is None and undrafted.shapes == (None,)


def test_a_choice_holds_for_some_steps_of_one_batch_alone() -> None:
    policy = UniformPolicy(TREE, adaptive=True)
    run(policy, 1, 500, 0.9, bound_by_weights)
    hopeless = TrackRecord()
    for _ in range(100):
        for shape in policy.shapes:
            if shape:
                hopeless.observe(shape, shape.num_steps, 0)
    held = policy._chosen
    policy._held, policy._since = 5, 0.0
    assert held is not None and policy.choose([hopeless]) == held
    policy.reconsider()
    assert policy.choose([hopeless]) is None


def test_the_plain_step_is_not_measured_cold() -> None:
    """Its first steps follow a long prefill, and every shape is compared with it."""
    policy = UniformPolicy(TREE, adaptive=True)
    assert policy.begin_trial(None, 1) == 1 + WARM
    assert policy.begin_trial(DraftShape(1, 1, 2), 1) == 1 + TRIES
