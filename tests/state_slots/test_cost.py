"""A running estimate of what work costs follows the machine and ignores hiccups."""

import random

import pytest

from specdec.state_slots.cost import HICCUP, OnlineCost


def measured(fixed_s: float, slope_s: float, sizes: list[float], *, noise: float = 0.0) -> OnlineCost:
    cost, rng = OnlineCost(), random.Random(1)
    for size in sizes:
        cost.observe(size, (fixed_s + slope_s * size) * rng.uniform(1 - noise, 1 + noise))
    return cost


def test_a_line_is_found() -> None:
    cost = measured(0.5, 0.01, [random.Random(i).uniform(1, 200) for i in range(100)])
    assert cost.predict(100) == pytest.approx(1.5, rel=0.02)
    assert cost.predict(1) == pytest.approx(0.51, rel=0.05)
    assert cost.fitting(1.5) == pytest.approx(100, rel=0.02)
    assert cost.fitting(0.1) == 0.0


def test_noise_does_not_move_the_middle() -> None:
    cost = measured(0.5, 0.01, [random.Random(i).uniform(1, 200) for i in range(200)], noise=0.2)
    assert cost.predict(100) == pytest.approx(1.5, rel=0.1)


def test_sizes_that_are_all_alike_cost_in_proportion() -> None:
    cost = measured(0.0, 0.01, [50.0] * 30)
    assert cost.predict(50) == pytest.approx(0.5) and cost.predict(100) == pytest.approx(1.0)


@pytest.mark.parametrize("slope_s", [-0.01, 0.0])
def test_cost_never_falls_with_size(slope_s: float) -> None:
    cost = measured(3.0, slope_s, [random.Random(i).uniform(1, 200) for i in range(100)])
    assert cost.predict(200) >= cost.predict(1) > 0


def test_nothing_is_fixed_below_zero() -> None:
    cost = OnlineCost()
    for size in range(1, 50):
        cost.observe(size, size**2)
    assert cost.fixed_s == 0 and cost.predict(40) > 0


def test_a_hiccup_counts_little_and_a_slower_machine_is_followed() -> None:
    cost = measured(0.0, 0.01, [50.0] * 30)
    cost.observe(50, 1000.0)
    assert cost.predict(50) < 0.5 + 0.5 * HICCUP * 0.1
    for _ in range(100):
        cost.observe(50, 5.0)
    assert cost.predict(50) == pytest.approx(5.0, rel=0.05)


def test_nothing_is_known_at_first() -> None:
    cost = OnlineCost()
    assert cost.predict(10) == 0.0 and cost.fitting(1.0) == float("inf")
    cost.observe(0, 0.0)
    assert cost.predict(10) == 0.0
