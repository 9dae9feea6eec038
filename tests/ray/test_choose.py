"""The choice of a replica: the fastest by measurement, then the least loaded, and never one for all."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable

import pytest

from specdec.ray.choose import FEW, choose, cost_s
from specdec.ray.load import Flight, Load, fit_lines
from specdec.ray.prompts import Prompt, look_at
from specdec.ray.rates import NONE, START, Line, Measured, added, fitted

LINE = Line(0.1, 1e-5)


def prompt_of(text: str) -> Prompt:
    return look_at(json.dumps({"prompt": text, "stream": True}).encode(), {})


LONG = prompt_of("a word and another " * 500)


def loads_of(count: int) -> list[Load]:
    return [Load(f"http://10.0.0.{i}:8000") for i in range(count)]


def chosen(loads: list[Load], prompt: Prompt, load_factor: float = 1.25) -> Load:
    choice = choose(loads, prompt, load_factor)
    assert choice
    return choice.replica


def test_none_of_none() -> None:
    assert choose([], LONG, 1.25) is None


def test_who_was_sent_the_beginning_is_asked_again() -> None:
    loads = loads_of(8)
    loads[5].known.note(LONG)
    longer = prompt_of("a word and another " * 700)
    assert chosen(loads, longer) is loads[5]
    own, shared = loads[5], loads[5].known.hit(longer)
    assert LONG.size * 15 / 16 < shared <= LONG.size
    assert cost_s(own, LINE, longer) == pytest.approx(LINE.at(2 * (longer.size - shared)))


def test_a_queue_that_is_longer_than_what_is_saved_is_avoided() -> None:
    loads = loads_of(2)
    first, second = loads
    first.known.note(LONG)
    first.reading = LONG.size
    assert chosen(loads, LONG) is first, "computing it twice delays others"
    first.reading = 3 * LONG.size
    assert chosen(loads, LONG) is second


def test_one_prefix_does_not_drown_one_replica() -> None:
    loads = loads_of(4)
    for _ in range(40):
        own = chosen(loads, LONG)
        own.in_flight += 1
        own.known.note(LONG)
    counts = [load.in_flight for load in loads]
    assert max(counts) <= 13 and min(counts) >= 1  # 1.25 x the mean of 10, rounded up
    loads = loads_of(4)
    loads[2].known.note(LONG)
    for _ in range(FEW):
        chosen(loads, LONG).in_flight += 1
    assert loads[2].in_flight == FEW, "a few requests stay together"
    assert chosen(loads, LONG) is not loads[2]
    loads = loads_of(4)
    loads[2].known.note(LONG)
    for _ in range(40):
        chosen(loads, LONG, load_factor=1000).in_flight += 1
    assert loads[2].in_flight == 40, "without a bound the prefix goes to one"


def test_of_equally_fast_ones_the_emptiest_is_asked() -> None:
    loads = loads_of(3)
    for emptiest in loads:
        for load in loads:
            load.arena = 0.3 if load is emptiest else 0.5
        assert chosen(loads, prompt_of("short")) is emptiest


def test_equal_prompts_go_to_one_replica_and_others_are_spread() -> None:
    several, counts = [loads_of(4), loads_of(4)], Counter[str]()
    for i in range(400):
        prompt = prompt_of(f"{i} is another beginning")
        one, other = (chosen(loads, prompt) for loads in several)
        assert one.name == other.name, "two routers without shared state agree"
        counts[one.name] += 1
    assert len(counts) == 4 and min(counts.values()) > 60


@pytest.mark.parametrize("seconds", [0.002, 5.0])
def test_a_replica_that_was_never_measured_is_as_fast_as_the_others(seconds: float) -> None:
    loads = loads_of(2)
    for _ in range(3):
        loads[0].measured.add(30.0, seconds, time.monotonic())
    lines = fit_lines(loads)
    assert lines[1].at(30) == pytest.approx(lines[0].at(30), rel=0.04), "else it might never be measured"


def test_a_replica_that_is_faster_is_asked_more() -> None:
    loads = loads_of(2)
    fast, slow = loads
    for size in (0, 4000, 16000, 64000):
        fast.measured.add(size, 0.01 + 1e-6 * size, 0.0)
        slow.measured.add(size, 0.01 + 1e-4 * size, 0.0)
    lines = [fitted(own.measured.sums(0.0), START) for own in (fast, slow)]
    assert lines[0].per_byte_s < lines[1].per_byte_s / 5


def test_a_line_is_fitted_to_what_was_measured() -> None:
    measured, true = Measured(), Line(0.05, 2e-5)
    for i in range(200):
        measured.add(100.0 * (i % 50), true.at(100.0 * (i % 50)), i * 0.1)
    line = fitted(measured.sums(20.0), START)
    assert line.fixed_s == pytest.approx(true.fixed_s, rel=0.2)
    assert line.per_byte_s == pytest.approx(true.per_byte_s, rel=0.25)


@pytest.mark.parametrize(
    "points", [[(1000.0, 0.5)] * 20, [(0.0, 9.0), (8000.0, 0.1)], [(1e9, 1e-9)], [(0.0, 0.0)]]
)
def test_a_line_never_falls_and_never_begins_below_zero(points: list[tuple[float, float]]) -> None:
    measured = Measured()
    for size, seconds in points:
        measured.add(size, seconds, 0.0)
    line = fitted(measured.sums(0.0), START)
    assert line.fixed_s >= 0 and line.per_byte_s >= 0


def test_old_measurements_give_way_to_those_of_all() -> None:
    measured = Measured()
    for _ in range(50):
        measured.add(1000.0, 30.0, 0.0)
    assert fitted(measured.sums(0.0), LINE).at(1000) > 20
    assert fitted(measured.sums(3600.0), LINE).at(1000) == pytest.approx(LINE.at(1000), rel=0.01)
    assert added([]) == NONE


def in_loop(work: Callable[[], None]) -> None:
    async def run() -> None:
        work()

    asyncio.run(run())


def test_what_is_under_way_is_counted_until_its_end() -> None:
    def work() -> None:
        own = loads_of(1)[0]
        flight = Flight(own, LONG, LINE)
        assert own.in_flight == 1 and own.reading == LONG.size
        second = Flight(own, LONG, LINE)
        assert own.in_flight == 2 and own.reading == 2 * LONG.size - own.known.hit(LONG), "most is known"
        second.begun()
        second.end()
        flight.begun()
        assert own.in_flight == 1 and own.reading == 0
        flight.end_reading()
        assert own.reading == 0
        flight.end()
        assert own.in_flight == 0 and own.measured.sums(0.0)[0] > 1

    in_loop(work)
