"""What a step costs, learnt from the steps themselves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from math import log2
from statistics import median

KEPT = 7
"""Samples of a cell whose median counts: enough to ignore a hiccup, few enough to follow the machine."""

EXACT = 64
STALE = 200
"""Steps after which an older time says nothing of the machine as it is."""

LEAP = 4.0
"""By how much one step may say that the machine's pace has changed: a hiccup says more."""


class Samples:
    """Remember the last times of each cell."""

    def __init__(self) -> None:
        self._cells: dict[Hashable, deque[float]] = {}
        self._medians: dict[Hashable, float] = {}

    def add(self, cell: Hashable, seconds: float) -> None:
        """Note one time."""
        kept = self._cells.setdefault(cell, deque(maxlen=KEPT))
        kept.append(seconds)
        self._medians[cell] = median(kept)

    def get(self, cell: Hashable) -> float | None:
        """Return the median of the last times, or None."""
        return self._medians.get(cell)


class StepCosts:
    """Predict the seconds of a verify step from its rows and its tokens.

    Steps of about as many rows share a line through what each width was found to take. Where none were made,
    the line of the nearest number of rows serves; a line of one point has the slope of the nearest with two.

    Machines get busy and quiet again, and contexts grow. What moves the width at hand moves all: times are
    kept as multiples of a pace, so that widths which were last tried in a slow hour are not held to be slow.
    """

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._steps = 0
        self._pace = 1.0

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Note what a step took."""
        self._steps += 1
        line = self._lines.setdefault(bucket(rows), Line())
        if known := line.settled(tokens):
            self._pace *= min(max(seconds / (self._pace * known), 1 / LEAP), LEAP) ** 0.5
        line.add(tokens, seconds / self._pace, self._steps)

    def predict(self, rows: int, tokens: int) -> float:
        """Return seconds; 0 while nothing is known."""
        return self._pace * self._multiple(rows, tokens)

    def _multiple(self, rows: int, tokens: int) -> float:
        if not self._lines:
            return 0.0
        key = bucket(rows)
        line = self._lines.get(key) or self._lines[min(self._lines, key=lambda known: abs(known - key))]
        slope = line.slope
        if slope is None:
            sloped = [known for known, other in self._lines.items() if other.slope is not None]
            nearest = min(sloped, key=lambda known: abs(known - key), default=None)
            slope = None if nearest is None else self._lines[nearest].slope
        return line.at(tokens, slope or 0.0)


class Line:
    """Seconds by tokens: straight between the widths that were measured, with one slope beyond them."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._kept: list[deque[tuple[int, float]]] = []
        self._last: list[int] = []
        self._points: list[tuple[float, float]] = []

    def add(self, tokens: int, seconds: float, step: int) -> None:
        """Note one time. Widths of one key share a point, where their own medians lie.

        What a point has from long before is forgotten.
        """
        key = _width_key(tokens)
        i = bisect_left(self._keys, key)
        if i == len(self._keys) or self._keys[i] != key:
            self._keys.insert(i, key)
            self._kept.insert(i, deque(maxlen=KEPT))
            self._points.insert(i, (tokens, seconds))
            self._last.insert(i, step)
        if step - self._last[i] > STALE:
            self._kept[i].clear()
        self._last[i] = step
        self._kept[i].append((tokens, seconds))
        self._points[i] = median(n for n, _ in self._kept[i]), median(s for _, s in self._kept[i])

    def settled(self, tokens: int) -> float | None:
        """Return the median at a width that was tried often enough to be trusted, and lately."""
        key = _width_key(tokens)
        i = bisect_left(self._keys, key)
        known = i < len(self._keys) and self._keys[i] == key and len(self._kept[i]) > KEPT // 2
        return self._points[i][1] if known else None

    @property
    def slope(self) -> float | None:
        """Return what a token adds, from the narrowest width to the widest; None with fewer than two."""
        if len(self._points) < 2:
            return None
        (low, low_s), (high, high_s) = self._points[0], self._points[-1]
        return max((high_s - low_s) / (high - low), 0.0)

    def at(self, tokens: int, slope: float) -> float:
        """Return the seconds at a width."""
        points = self._points
        i = bisect_left(points, (tokens, 0.0))
        if 0 < i < len(points):
            (low, low_s), (high, high_s) = points[i - 1], points[i]
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
        nearest, seconds = points[0 if i == 0 else -1]
        return max(seconds + slope * (tokens - nearest), 0.0)


def bucket(count: int) -> int:
    """Put counts within a fifth of each other together."""
    return round(4 * log2(count))


def _width_key(tokens: int) -> int:
    """Tell narrow widths apart, for one token more may cost a tile more; put wide ones together."""
    return tokens if tokens <= EXACT else EXACT + bucket(tokens)
