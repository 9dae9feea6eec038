"""Copies between tiers are timed with stream events, without waiting for them."""

from typing import Self

import pytest
import torch

from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout
from specdec.state_slots.prefix.rates import RECENT, UNREAD, TierRates, TimeMark

LAYOUT = Layout((KVShape(2, 8),), (), torch.float32, torch.float32)


class Stream:
    """A simulated device stream: it reaches its events on request."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        """Time of each event that was reached."""
        self.marks = 0

    def mark(self, *arenas: Arena) -> TimeMark:
        assert len(arenas) == 2
        self.marks += 1
        return Place(self, self.marks - 1)


class Place:
    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place = stream, place

    def passed(self) -> bool:
        return self.place < len(self.stream.seconds)

    def seconds_since(self, earlier: Self) -> float:
        return self.stream.seconds[self.place] - self.stream.seconds[earlier.place]


@pytest.fixture
def arenas() -> tuple[Arena, Arena]:
    first, second = (Arena(LAYOUT, 4 * LAYOUT.slab_bytes, torch.device("cpu")) for _ in range(2))
    return first, second


def copy(rates: TierRates, source: Arena, to: Arena) -> int:
    """Copy the first block, and return its bytes."""
    rates.copy(source, to, [(1, 1)])
    return source.block_bytes_X(1).numel()


def test_a_copy_is_timed_after_the_device_completes_it(
    arenas: tuple[Arena, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("the device was waited for")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    stream = Stream()
    rates = TierRates(stream.mark)
    rates.observe_prefill(1.0, 1e-9)
    size = copy(rates, *arenas)
    assert rates.copied_s is None and rates.pays(10**9, 1.0), "it is tried until it was measured"
    stream.seconds = [5.0]
    assert rates.copied_s is None
    stream.seconds = [5.0, 7.0]  # the 5 s of earlier work in the stream are not counted
    assert rates.copied_s == 2.0 / size
    assert not rates.pays(10**9, 1.0)
    copy(rates, *reversed(arenas))
    stream.seconds += [10.0, 11.0]
    assert rates.copied_s == pytest.approx((1 - RECENT) * 2.0 / size + RECENT * 1.0 / size)


def test_a_tier_is_not_timed_against_itself(arenas: tuple[Arena, Arena]) -> None:
    stream = Stream()
    rates = TierRates(stream.mark)
    copy(rates, arenas[0], arenas[0])
    rates.copy(*arenas)
    assert stream.marks == 0


def test_times_that_are_never_read_do_not_pile_up(arenas: tuple[Arena, Arena]) -> None:
    stream = Stream()
    rates = TierRates(stream.mark)
    for _ in range(2 * UNREAD):
        copy(rates, *arenas)
    stream.seconds = [float(i) for i in range(stream.marks)]
    assert rates.copied_s is not None
    assert len(rates._begun) == 0


def test_copies_are_made_as_they_are_begun(arenas: tuple[Arena, Arena]) -> None:
    source, to = arenas
    source.block_bytes_X(1).fill_(7)
    rates = TierRates()
    copy(rates, source, to)
    assert (to.block_bytes_X(1) == 7).all()
    assert rates.copied_s is not None, "the host's copies are over when they return"
