"""Track records: accepted depth by request and engine, for chains and trees."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.acceptance import CHAIN_HOPE, DEEPEST, TREE_HOPE, Acceptance, TrackRecord
from specdec.draft.proposal import DraftShape

CHAIN, TREE = DraftShape(4, 1, 5), DraftShape(4, 3, 9)


def accepted(rng: Random, rates: list[float], depth: int) -> int:
    """Draw the accepted depth of a draft."""
    reached = 0
    while reached < depth and rng.random() < rates[reached]:
        reached += 1
    return reached


def test_without_experience_the_hope_holds() -> None:
    track = TrackRecord()
    assert track.expected(CHAIN, 2) == pytest.approx(CHAIN_HOPE + CHAIN_HOPE**2)
    assert track.expected(TREE, 1) == pytest.approx(TREE_HOPE)
    assert track.expected(CHAIN, 0) == 0.0


def test_rates_by_depth_are_what_was_observed() -> None:
    rng, rates, engine = Random(1), [0.9, 0.4, 0.7, 0.2], Acceptance(0.6)
    found, mean = [0.0] * 4, 0.0
    for step in range(6000):
        engine.observe(4, accepted(rng, rates, 4))
        if step >= 3000:
            found = [a + b / 3000 for a, b in zip(found, engine.rates, strict=False)]
            mean += engine.expected(4) / 3000
    assert found == pytest.approx(rates, abs=0.06)
    assert mean == pytest.approx(0.9 + 0.36 + 0.252 + 0.0504, abs=0.1)


def test_a_depth_counts_only_where_the_one_above_was_accepted() -> None:
    one, other = Acceptance(0.5), Acceptance(0.5)
    for _ in range(40):
        one.observe(4, 1)
        other.observe(2, 1)
    assert one.rates == other.rates
    assert one.rates[0] > 0.8 and one.rates[1] < 0.3


def test_a_depth_that_nobody_reached_is_expected_to_be_like_the_one_above() -> None:
    track = Acceptance(0.5)
    for _ in range(40):
        track.observe(2, 2)
    assert min(track.rates) > 0.8 and len(set(track.rates[2:])) <= 2
    for _ in range(200):
        track.observe(2, 1)
    assert track.rates[0] > 0.9 and max(track.rates[1:]) < 0.4


def test_a_request_expects_deeper_down_what_others_found_there_as_far_as_it_is_like_them() -> None:
    engine = Acceptance(0.5)
    others, like, unlike = Acceptance(engine), Acceptance(engine), Acceptance(engine)
    for step in range(200):
        others.observe(3, 3 if step % 3 == 0 else 2)
    for _ in range(12):
        like.observe(1, 1)
        unlike.observe(1, 0)
    assert like.rates[1] > 0.8 and 0.2 < like.rates[2] < 0.5
    assert unlike.rates[2] < unlike.rates[1] < 0.4


def test_what_was_seen_of_a_request_fades_while_it_rests() -> None:
    engine = TrackRecord()
    others, own = TrackRecord(engine), TrackRecord(engine)
    for _ in range(100):
        others.observe(CHAIN, 2, 2)
    for _ in range(20):
        own.observe(CHAIN, 1, 0)
    before, overall = own.expected(CHAIN, 1), engine.expected(CHAIN, 1)
    own.decay(20)
    between = own.expected(CHAIN, 1)
    own.decay(500)
    assert before < between < overall == engine.expected(CHAIN, 1)
    assert own.expected(CHAIN, 1) == pytest.approx(overall, rel=0.01)


def test_finding_nothing_to_draft_counts_as_a_rejected_draft() -> None:
    nothing, rejected = Acceptance(0.5), Acceptance(0.5)
    nothing.observe(0, 0)
    rejected.observe(1, 0)
    assert nothing.rates == rejected.rates and nothing.rates[0] < 0.5


def test_a_request_starts_from_the_engines_experience_and_adds_to_it() -> None:
    engine = TrackRecord()
    first = TrackRecord(engine)
    for _ in range(100):
        first.observe(CHAIN, 1, 0)
    assert engine.expected(CHAIN, 1) < 0.06
    second = TrackRecord(engine)
    assert second.expected(CHAIN, 1) == pytest.approx(engine.expected(CHAIN, 1))
    for _ in range(6):
        second.observe(CHAIN, 1, 1)
    assert second.expected(CHAIN, 1) > 0.5 > first.expected(CHAIN, 1)


def test_what_one_request_learns_reaches_another_at_once() -> None:
    """Cached expectations must be invalidated when their data change."""
    engine = TrackRecord()
    one, other = TrackRecord(engine), TrackRecord(engine)
    before = other.expected(CHAIN, 3)
    for _ in range(20):
        one.observe(CHAIN, 3, 0)
    assert other.expected(CHAIN, 3) < before


def test_chains_and_trees_are_judged_apart() -> None:
    track = TrackRecord()
    for _ in range(20):
        track.observe(CHAIN, 4, 0)
        track.observe(TREE, 4, 4)
    assert track.expected(CHAIN, 4) < 0.5 and track.expected(TREE, 4) > 3
    assert track.expected(DraftShape(2, 1, 3), 2) < 0.5 < track.expected(DraftShape(4, 2, 5), 4)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0)])
def test_a_request_follows_its_last_drafts_sooner_than_the_engine(before: int, after: int) -> None:
    engine = TrackRecord()
    for request in (TrackRecord(engine), own := TrackRecord(engine)):
        for _ in range(150):
            request.observe(CHAIN, 3, before)
    for _ in range(25):
        own.observe(CHAIN, 3, after)
    assert (own.expected(CHAIN, 1) > 0.6) == (after > 0)
    assert (engine.expected(CHAIN, 1) > 0.6) == (before > 0)


def test_deeper_than_is_told_apart_is_no_mistake() -> None:
    track = Acceptance(0.5)
    for _ in range(50):
        track.observe(3 * DEEPEST, 3 * DEEPEST)
    assert min(track.rates) > 0.85
    assert track.expected(3 * DEEPEST) >= track.expected(DEEPEST) > 0.9 * DEEPEST / 2


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=40), st.integers(0, 19))
def test_an_expectation_grows_with_the_depth_and_never_exceeds_it(
    history: list[tuple[int, int]], depth: int
) -> None:
    engine = TrackRecord()
    track = TrackRecord(engine)
    for drafted, followed in history:
        track.observe(CHAIN, drafted, min(drafted, followed))
    for record in (engine, track):
        assert 0 <= record.expected(CHAIN, depth) <= record.expected(CHAIN, depth + 1)
        assert record.expected(CHAIN, depth) <= depth
