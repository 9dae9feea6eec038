"""Axes: round ticks that fit, places within the picture, and figures as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.bench.charts.scale import fit, linear_ticks, number, percent, spaced, times

values = st.floats(-1e9, 1e9, allow_nan=False)
positive = st.floats(1e-9, 1e9)


@given(low=values, span=st.floats(1e-6, 1e9), most=st.integers(3, 12))
def test_linear_ticks_are_round_few_and_enclose_both_ends(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = linear_ticks(low, high, most)
    assert 2 <= len(ticks) <= most
    room = (high - low) * 1e-6 + 1e-9 * max(abs(low), abs(high))
    assert ticks[0] <= low + room and high - room <= ticks[-1]
    step = ticks[1] - ticks[0]
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5)) < 1e-2, step


@given(a=positive, b=positive, log=st.booleans())
def test_every_value_has_a_place_between_the_ends(a: float, b: float, log: bool) -> None:
    scale = fit([a, b, None, math.nan, math.inf], log=log).between(0, 100)
    assert all(-1e-6 <= scale.place(v) <= 100 + 1e-6 for v in (a, b, *scale.ticks))
    assert (scale.place(a) < scale.place(b)) == (a < b) or math.isclose(a, b, rel_tol=1e-6)
    assert 1 <= len(scale.ticks) <= 8


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 1e5, [1, 10, 100, 1e3, 1e4, 1e5]),
        (1, 300, [1, 2, 5, 10, 20, 50, 100, 200]),
        (2.1, 12.5, [3, 5, 7, 10]),
        (1e-9, 1e9, [1e-9, 1e-6, 1e-3, 1, 1e3, 1e6, 1e9]),
    ],
)
def test_log_ticks_fill_the_axis(low: float, high: float, ticks: list[float]) -> None:
    assert fit([low, high], log=True).ticks == pytest.approx(ticks)


def test_one_value_and_none_still_make_an_axis() -> None:
    for values, log in (
        ([], False),
        ([], True),
        ([3.0], False),
        ([3.0], True),
        ([0.0], False),
        ([0.0], True),
    ):
        scale = fit(values, log=log)
        assert scale.low < scale.high
    assert fit([1.0], whole=True).ticks == (0, 1, 2)
    assert all(float(t).is_integer() for t in fit([1, 3], whole=True).ticks)


def test_figures_are_written_for_people() -> None:
    written = {
        0: "0",
        0.30000000000000004: "0.3",
        12.345: "12.35",
        123.4: "123.4",
        1250: "1,250",
        48000: "48k",
    }
    written |= {3.2e6: "3.2M", -4: "−4", 1e-5: "1e−5", math.nan: "–", 999.96: "1,000", 1e13: "10T"}
    assert {value: number(value) for value in written} == written
    assert (percent(0.1234), times(1.5), number(None), percent(None), times(None)) == (
        "12.3 %",
        "1.50×",
        *"–––",
    )


def test_ticks_whose_labels_would_touch_are_left_out() -> None:
    scale = fit([0, 1000]).between(0, 100)
    shown = spaced(scale, number, lambda text: 10.0 * len(text), 10)
    assert 0 < len(shown) < len(scale.ticks)
    assert list(spaced(scale, number, lambda text: 1.0, 1)) == list(scale.ticks)
