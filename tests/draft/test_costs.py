"""Predicted step costs: measured values where available, and a plausible estimate elsewhere."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft.costs import GROUP, KEPT, KEPT_WIDTH, Costs, CostSamples, bucket

APART = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Widths in different buckets."""


def alone(times: dict[int, float]) -> Costs:
    """Return costs with measured steps of one row, by tokens."""
    costs = Costs()
    for tokens, seconds in times.items():
        costs.observe(1, tokens, seconds)
    return costs


def test_a_cell_answers_with_a_quiet_moment_of_what_it_saw_last() -> None:
    samples = CostSamples()
    assert samples.get("cell") is None
    for seconds in [0.5] * 50 + [9.0, 2.0, 7.0, 1.0, 8.0, 9.0, 3.0][:KEPT]:
        samples.add("cell", seconds)
    assert samples.get("cell") == 2.0
    assert samples.get("other") is None


@pytest.mark.parametrize("rows", [1, 5])
def test_a_hiccup_says_nothing_of_its_width_and_a_slower_machine_of_all(rows: int) -> None:
    costs = Costs()
    for _ in range(KEPT):
        costs.observe(rows, 8, 1.0)
        costs.observe(rows, 16, 1.5)
    for _ in range(KEPT // 2):
        costs.observe(rows, 8, 50.0)
    assert costs.predict(rows, 16) == pytest.approx(1.5 * costs.predict(rows, 8), rel=0.01)
    for _ in range(2 * KEPT):
        costs.observe(rows, 8, 2.0)
    assert costs.predict(rows, 8) == pytest.approx(2.0, rel=0.01)
    assert costs.predict(rows, 16) == pytest.approx(3.0, rel=0.15)


def test_nothing_known_costs_nothing() -> None:
    assert Costs().predict(1, 4) == Costs().predict(6, 20) == 0.0


def test_steps_of_many_rows_are_known_without_any_of_one() -> None:
    costs = Costs()
    costs.observe(6, 20, 3.0)
    assert costs.predict(6, 20) == 3.0


@given(
    st.dictionaries(st.sampled_from(APART), st.floats(0.001, 1.0), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_a_width_between_two_that_were_measured_costs_between_them(
    times: dict[int, float], tokens: int
) -> None:
    times = dict(zip(sorted(times), sorted(times.values()), strict=True))
    costs = alone(times)
    found = costs.predict(1, tokens)
    if tokens in times:
        assert found == pytest.approx(times[tokens])
    elif min(times) < tokens < max(times):
        below = max(width for width in times if width < tokens)
        above = min(width for width in times if width > tokens)
        low, high = sorted((times[below], times[above]))
        assert low - 1e-12 <= found <= high + 1e-12


@given(st.dictionaries(st.sampled_from(APART), st.floats(0.001, 1.0), min_size=2, max_size=8))
def test_what_is_wider_is_never_said_to_cost_less(times: dict[int, float]) -> None:
    costs = alone(times)
    predicted = [costs.predict(1, width) for width in APART]
    assert all(wider >= narrower - 1e-12 for narrower, wider in pairwise(predicted))


def test_a_width_that_was_seen_once_in_a_slow_moment_gives_way_to_one_that_is_seen_always() -> None:
    costs = alone({1: 1.0, 2: 4.0})
    for _ in range(KEPT_WIDTH):
        costs.observe(1, 3, 1.5)
    assert costs.predict(1, 2) == pytest.approx(1.5, rel=0.1)


def test_while_one_width_is_at_work_a_slower_machine_is_slower_for_all() -> None:
    costs = Costs()
    for _ in range(KEPT):
        costs.observe(1, 1, 1.0)
        costs.observe(1, 4, 2.0)
    for _ in range(10 * KEPT_WIDTH):
        costs.observe(1, 4, 3.0)
    assert costs.predict(1, 1) == pytest.approx(1.5)


def test_a_width_half_way_costs_half_of_both() -> None:
    assert alone({4: 1.0, 8: 2.0}).predict(1, 6) == pytest.approx(1.5)


def test_the_order_in_which_widths_are_measured_is_no_matter() -> None:
    times = {1: 1.0, 2: 1.5, 8: 2.0, 16: 6.0}
    forwards, backwards = alone(times), alone(dict(reversed(times.items())))
    assert [forwards.predict(1, n) for n in range(1, 30)] == [backwards.predict(1, n) for n in range(1, 30)]


@given(st.floats(0, 10), st.floats(0, 1), st.integers(2, 64), st.integers(1, 64))
def test_beyond_the_widest_a_step_costs_more_but_not_out_of_proportion(
    step: float, token: float, widest: int, further: int
) -> None:
    costs = alone({width: step + token * width for width in (1, widest)})
    at = costs.predict(1, widest)
    assert at <= costs.predict(1, widest + further) <= at * (widest + further) / widest + 1e-9


@pytest.mark.parametrize(("step", "token"), [(20.0, 0.02), (50.0, 1.5), (1.0, 4.0)])
@pytest.mark.parametrize("rows", [2, 8, 32])
def test_steps_of_many_rows_are_guessed_from_one_of_theirs(rows: int, step: float, token: float) -> None:
    """With constant cost per token, one step with as many rows determines wider ones."""
    costs = alone({width: step + token * width for width in (1, 2, 4, 8)})
    costs.observe(rows, rows, step + token * rows)
    for nodes in (1, 2, 4):
        tokens = rows * (1 + nodes)
        assert costs.predict(rows, tokens) == pytest.approx(step + token * tokens, rel=0.05), tokens


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_each_further_token_is_told_to_cost_something(rows: int) -> None:
    """A draft must not look free because its measured step is as fast as one without."""
    costs = alone({width: 1.0 + 4.0 * width for width in (1, 2, 4, 8)})
    for tokens in (rows, rows + 1, rows + 2, rows + 3):
        for _ in range(KEPT):
            costs.observe(rows, tokens, 1.0 + 4.0 * tokens)
    predicted = [costs.predict(rows, rows + more) for more in range(4)]
    assert predicted == sorted(set(predicted))


def test_what_rows_cost_beyond_their_tokens_is_learnt_and_kept_apart_by_their_number() -> None:
    costs = alone({1: 10.0, 8: 10.0, 64: 10.0})
    costs.observe(8, 8, 14.0)
    costs.observe(32, 32, 20.0)
    assert costs.predict(8, 32) == pytest.approx(14.0)
    assert costs.predict(32, 64) == pytest.approx(20.0)
    assert costs.predict(1, 32) == pytest.approx(10.0)


def test_rows_of_several_widths_have_times_of_their_own() -> None:
    """Before measurements a further group adds a little; then its measured cost."""
    costs = alone({1: 1.0, 8: 2.0})
    costs.observe(8, 8, 4.0)
    one = [costs.predict(8, tokens) for tokens in (8, 16, 32)]
    guessed = [costs.predict(8, tokens, groups=3) for tokens in (8, 16, 32)]
    assert guessed == pytest.approx([time * (1 + GROUP) ** 2 for time in one])
    costs.observe(8, 16, 20.0, groups=3)
    assert costs.predict(8, 16, groups=3) == 20.0 and costs.predict(8, 32, groups=3) > 20.0
    assert costs.predict(8, 16, groups=4) == pytest.approx(20.0 * (1 + GROUP))
    assert [costs.predict(8, tokens) for tokens in (8, 16, 32)] == one


def test_where_nothing_was_measured_times_follow_the_work() -> None:
    """A step that loads the experts its tokens choose, of 64: measured at 1 and 8 tokens, and 4 rows at 4."""

    def met(tokens: int) -> float:
        return 16 * (1 - (15 / 16) ** tokens)

    def time(tokens: int) -> float:
        return 3.0 + 2.0 * met(tokens)

    straight, bent = Costs(), Costs(met)
    for costs in (straight, bent):
        for rows, tokens in ((1, 1), (1, 8), (4, 4)):
            costs.observe(rows, tokens, time(tokens))
    for rows, tokens in ((1, 4), (1, 24), (4, 16), (4, 32)):
        assert bent.predict(rows, tokens) == pytest.approx(time(tokens))
        assert abs(straight.predict(rows, tokens) / time(tokens) - 1) > 0.05
    for costs in (straight, bent):  # measurements take precedence
        costs.observe(4, 16, 50.0)
        assert costs.predict(4, 16) == pytest.approx(50.0)


def test_what_was_measured_is_believed_over_any_guess() -> None:
    costs = alone({1: 10.0, 8: 10.0})
    costs.observe(8, 8, 14.0)
    costs.observe(8, 32, 30.0)
    assert costs.predict(8, 32) == pytest.approx(30.0)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_counts_of_one_bucket_lie_within_a_fifth(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert bucket(low) <= bucket(high)
    if bucket(low) == bucket(high):
        assert high <= 1.2 * low


def buckets(counts: Sequence[int]) -> int:
    return len({bucket(count) for count in counts})


def test_few_counts_are_told_apart_and_many_need_few_buckets() -> None:
    assert buckets(range(1, 8)) == 7
    assert buckets(range(1, 1000)) < 45


def test_a_clock_that_sees_nothing_pass_leaves_a_pace() -> None:
    costs = Costs()
    for seconds in [1e-3] * 20 + [0.0] * 40 + [1e-3] * 20:
        costs.observe(1, 1, seconds)
    assert costs.pace > 0 and costs.predict(1, 1) > 0
