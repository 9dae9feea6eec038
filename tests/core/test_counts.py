"""Draft counters: sums, acceptance by depth, and step time by phase."""

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.stats import PHASES, PhaseTimer, SpeculationCounts, StepSums, context_bound

steps = st.integers(0, 8).flatmap(
    lambda depth: st.tuples(st.just(depth), st.integers(0, depth), st.integers(depth, depth + 5))
)
"""A draft's depth, its accepted depth, and its nodes."""


def test_nothing_counted_is_nothing() -> None:
    counts = SpeculationCounts()
    assert (counts.acceptance_length, counts.per_depth, counts.steps) == (0.0, (), 0)


def test_time_is_of_so_many_steps() -> None:
    counts = SpeculationCounts()
    for took_s in (1.0, 2.0):
        counts.spend({"draft": took_s, "verify": 0.5})
    assert (counts.timed, counts.seconds["draft"], counts.seconds["verify"]) == (2, 3.0, 1.0)


def test_counts_by_hand() -> None:
    """A chain of 3 with 1 accepted, a tree accepted to its end, a step without a draft."""
    counts = SpeculationCounts()
    counts.note(drafted=3, depth=2, accepted=1, tokens=2, context=1)
    counts.note(drafted=7, depth=2, accepted=2, tokens=3, context=1024)
    counts.note(drafted=0, depth=0, accepted=0, tokens=1, context=1025)
    counts.note(drafted=4, depth=1, accepted=0, tokens=1, context=9000)
    assert (counts.steps, counts.tokens, counts.drafted, counts.accepted) == (4, 7, 14, 3)
    assert counts.acceptance_length == 7 / 4
    assert counts.per_depth == (2 / 3, 1 / 2)
    assert counts.histogram == Counter({0: 2, 1: 1, 2: 1})
    own = counts.by_context()
    assert own == {1024: StepSums(2, 5, 10, 3), 2048: StepSums(1, 1, 0, 0), 16384: StepSums(1, 1, 4, 0)}
    assert [each.acceptance_length for each in own.values()] == [2.5, 1.0, 1.0]


def test_contexts_are_told_apart_by_doublings_above_the_shortest() -> None:
    lengths = [1, 2, 1023, 1024, 1025, 2048, 2049, 4096, 4097, 262_144]
    bounds = [1024] * 4 + [2048] * 2 + [4096] * 2 + [8192, 262_144]
    assert [context_bound(length) for length in lengths] == bounds


def test_what_is_told_by_context_stays_as_it_was() -> None:
    counts = SpeculationCounts()
    counts.note(drafted=3, depth=2, accepted=1, tokens=2, context=5)
    told = counts.by_context()
    counts.note(drafted=3, depth=2, accepted=1, tokens=2, context=5)
    assert told[1024].steps == 1 and counts.by_context()[1024].steps == 2


@given(st.lists(steps, max_size=30))
def test_sums_agree_with_each_other(drafts: list[tuple[int, int, int]]) -> None:
    counts = SpeculationCounts()
    for depth, accepted, drafted in drafts:
        counts.note(drafted=drafted, depth=depth, accepted=accepted, tokens=accepted + 1, context=1)
    assert counts.steps == len(drafts) == counts.histogram.total()
    assert counts.accepted == sum(n * times for n, times in counts.histogram.items()) == sum(counts.followed)
    assert counts.tokens == counts.accepted + counts.steps
    if drafts:
        assert counts.acceptance_length == pytest.approx(1 + counts.accepted / counts.steps)
    for i, rate in enumerate(counts.per_depth):
        reached = [d for d in drafts if d[0] > i and d[1] >= i]
        assert rate == pytest.approx(sum(d[1] > i for d in reached) / len(reached) if reached else 0.0)
    # Drafts that reached a depth had reached those above it.
    assert list(counts.reached) == sorted(counts.reached, reverse=True)


@given(st.lists(steps, min_size=1, max_size=20), st.integers(1, 4))
def test_the_engines_counts_are_the_sum_of_its_requests(
    drafts: list[tuple[int, int, int]], requests: int
) -> None:
    whole, parts = SpeculationCounts(), [SpeculationCounts() for _ in range(requests)]
    for i, (depth, accepted, drafted) in enumerate(drafts):
        for counts in (whole, parts[i % requests]):
            own = {"drafted": drafted, "depth": depth, "accepted": accepted, "tokens": accepted + 1}
            counts.note(**own, context=700 * (i + 1))
    for name in ("steps", "tokens", "drafted", "accepted"):
        assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
        assert getattr(whole, name) == sum(getattr(own, name) for own in whole.by_context().values())
    assert whole.histogram == sum((part.histogram for part in parts), Counter[int]())
    for i, reached in enumerate(whole.reached):
        assert reached == sum(part.reached[i] for part in parts if i < len(part.reached))


def test_a_clock_puts_all_of_a_step_down_to_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = [("rest", 1.0), ("draft", 2.0), ("verify", 5.0), ("commit", 0.5), ("rest", 0.25)]
    times = accumulate((took_s for _, took_s in laps), initial=100.0)
    monkeypatch.setattr("specdec.core.stats.time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = PhaseTimer()
    for phase, _ in laps:
        clock.lap(phase)
    assert clock.seconds == {"draft": 2.0, "verify": 5.0, "commit": 0.5, "rest": 1.25, "whole": 0.0}
    counts = SpeculationCounts()
    counts.spend(clock.seconds)
    counts.spend(clock.seconds)
    assert counts.seconds == {phase: 2 * clock.seconds[phase] for phase in PHASES}
