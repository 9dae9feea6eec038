"""Hostile grammars, and their effect on a stream beside them."""

import random
from collections.abc import Iterator

import pytest

from tests.selection import EXHAUSTIVE, only
from tests.server.hostile_grammars import attack, hostile, x_bias
from tests.server.live import Live, serving, total

GAP_S = 5.0
"""It is well under a second on an idle machine."""
ISSUE, SLOW = "(((((x{0,60}){0,50}){0,50}){0,50}){0,50})", "((x{0,60}){0,40}){0,40}"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    yield from serving()


@EXHAUSTIVE
@pytest.mark.parametrize(("form", "at_once"), only({(ISSUE, 12)}, [(ISSUE, 12), (SLOW, 100)]))
def test_a_hostile_regex_holds_no_stream_up(live: Live, form: str, at_once: int) -> None:
    """A regex of 40 characters froze all streams for a minute, and a hundred of them killed the process."""
    found = attack(live, [{"regex": form}] * at_once, at_once=at_once, bias=x_bias(live))
    assert found.pieces > 0 and found.gap_s < GAP_S
    assert found.statuses == {400: at_once} and not found.unhealthy
    assert live.process.poll() is None and total(live.metrics(), "specdec:failed_steps_total") == 0


@EXHAUSTIVE
def test_random_hostile_grammars_delay_no_stream(live: Live) -> None:
    draw = random.Random(7)
    found = attack(live, [hostile(draw) for _ in range(40)], at_once=6, bias=x_bias(live))
    assert found.pieces > 0 and found.gap_s < GAP_S
    assert set(found.statuses) <= {200, 400} and not found.unhealthy
    answer = live.ask("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["yes"]}})
    assert answer.json["choices"][0]["text"] == "yes"
