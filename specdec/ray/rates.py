"""How long a first byte takes by what is to be read before it: a line fitted to what was measured lately."""

import math
from collections.abc import Iterable
from typing import NamedTuple

Sums = tuple[float, float, float, float, float]
"""Weight, sizes, seconds, squares of sizes, sizes times seconds."""
NONE: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)

HALVED_S = 60.0
"""Seconds after which a measurement counts half."""
FADE = 0.98
"""What an older measurement counts for each newer one."""
BORROWED = 0.5
"""Weight, in measurements, of each of the two points that a replica takes from all replicas' line."""
ASSUMED = 0.01
"""Weight of those that all replicas' line takes from START: next to none once anything was measured."""
FAR = 8192.0
"""Bytes where the second of them lies; the first lies at none."""


class Line(NamedTuple):
    """Seconds to a first byte: `fixed_s` and `per_byte_s` for each byte to be read."""

    fixed_s: float
    per_byte_s: float

    def at(self, size: float) -> float:
        return self.fixed_s + self.per_byte_s * size


START = Line(0.02, 5e-6)
"""Before anything was measured."""


class Measured:
    """Weighted sums of measurements, which fade with time and number; all of them are of the event loop's."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sums = NONE

    def add(self, size: float, seconds: float, now_s: float) -> None:
        """Take in a measurement."""
        keep = FADE * self._faded(now_s)
        weight, x, y, xx, xy = (keep * own for own in self._sums)
        self._sums = weight + 1, x + size, y + seconds, xx + size * size, xy + size * seconds
        self._now_s = now_s

    def sums(self, now_s: float) -> Sums:
        """Return the remaining measurements."""
        keep = self._faded(now_s)
        weight, x, y, xx, xy = (keep * own for own in self._sums)
        return weight, x, y, xx, xy

    def _faded(self, now_s: float) -> float:
        return math.exp2(-max(now_s - self._now_s, 0.0) / HALVED_S)


def fitted(sums: Sums, borrowed: Line, lent: float = BORROWED) -> Line:
    """Fit a line by least squares, with two points of another one; it never falls or begins below zero."""
    weight, x, y, xx, xy = sums
    for size in (0.0, FAR):
        seconds = borrowed.at(size)
        weight, x, y = weight + lent, x + lent * size, y + lent * seconds
        xx, xy = xx + lent * size * size, xy + lent * size * seconds
    slope = max((weight * xy - x * y) / (weight * xx - x * x), 0.0)
    fixed_s = (y - slope * x) / weight
    return Line(fixed_s, slope) if fixed_s >= 0 else Line(0.0, max(xy / xx, 0.0))


def added(several: Iterable[Sums]) -> Sums:
    """Add up the measurements of several replicas."""
    weight, x, y, xx, xy = (math.fsum(own) for own in zip(NONE, *several, strict=True))
    return weight, x, y, xx, xy
