"""Step cost model, fitted to measured step times."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable
from math import log2
from statistics import median

KEPT = 7
"""Samples per cell: enough to ignore outliers, few enough to follow changes of the machine."""
KEPT_WIDTH = 32
"""Samples per width; more than `KEPT` because the relative cost of widths changes slowly."""

EXACT = 64
TICK_S = 1e-9
"""Minimum time, for clocks too coarse to measure a step."""
STALE = 200
"""Steps after which a measurement is out of date."""
GROUP = 0.01
"""Assumed cost of one more width group, as a fraction of a step, until measured."""

Work = Callable[[int], float]
"""Work of a number of tokens relative to one: doubling the width does not double the work."""


def quiet(times: Collection[float]) -> float:
    """Return the lower quartile of times: other load on the machine only makes steps slower.

    With few samples under load, the median may be several times too long.
    """
    return sorted(times)[(len(times) - 1) // 4]


class CostSamples:
    """The last times of each cell."""

    def __init__(self) -> None:
        self._cells: dict[Hashable, deque[float]] = {}
        self._quiet: dict[Hashable, float] = {}

    def add(self, cell: Hashable, seconds: float) -> None:
        """Add a time."""
        kept = self._cells.setdefault(cell, deque(maxlen=KEPT))
        kept.append(seconds)
        self._quiet[cell] = quiet(kept)

    def get(self, cell: Hashable) -> float | None:
        """Return the lower quartile of the cell's last times, or None."""
        return self._quiet.get(cell)


class Costs:
    """Predict seconds from the number of rows and a width: tokens of a verify step, or levels of a draft.

    There is one line per bucket of rows and number of widths. Unmeasured keys use the nearest line; a line
    with a single point takes its slope from the nearest line with two. Lines are straight in `work`.

    Machine load and context length scale all widths alike, while mostly one width is in use. So times are
    stored relative to a `pace`, which adapts quickly; the relative times adapt slowly. Both use the lower
    quartile: other load lengthens all work in proportion.
    """

    def __init__(self, work: Work = float) -> None:
        self._work = work
        self._lines: dict[tuple[int, int], CostCurve] = {}
        """Keyed by the bucket of rows and the number of widths."""
        self._ratios: deque[float] = deque([1.0], maxlen=KEPT)
        self.pace = 1.0
        """Current slowdown, relative to the time when the lines were measured."""

    def observe(self, rows: int, width: int, seconds: float, groups: int = 1) -> None:
        """Record a measured time by rows, width and number of width groups."""
        line = self._lines.setdefault((bucket(rows), groups), CostCurve())
        seconds = max(seconds, TICK_S)
        if usual_s := line.settled(width):
            self._ratios.append(seconds / usual_s)
            self.pace = quiet(self._ratios)
        line.add(width, self._work(width), seconds / self.pace)

    def predict(self, rows: int, width: int, groups: int = 1) -> float:
        """Return predicted seconds; 0 without measurements."""
        return self.curve(rows, groups)(width)

    def curve(self, rows: int, groups: int = 1) -> Callable[[int], float]:
        """Return `predict` as a function of the width; valid until the next observation."""
        if not self._lines:
            return lambda width: 0.0
        key, scale = (bucket(rows), groups), self.pace
        line = self._lines.get(key)
        if line is None:
            nearest = _nearest(self._lines, key)
            line = self._lines[nearest]
            scale *= (1 + GROUP) ** (groups - nearest[1])
        slope = line.slope
        if slope is None:
            sloped = {key: other.slope for key, other in self._lines.items() if other.slope is not None}
            slope = sloped[_nearest(sloped, key)] if sloped else 0.0
        at, work = line.at, self._work
        return lambda width: scale * at(work(width), slope)

    def knows(self, rows: int, width: int) -> bool:
        """Return whether this width has enough samples for a reliable estimate."""
        line = self._lines.get((bucket(rows), 1))
        return line is not None and line.settled(width) is not None


def _nearest(keys: Collection[tuple[int, int]], key: tuple[int, int]) -> tuple[int, int]:
    """Return the key with the nearest row bucket, ties broken by the nearest number of groups."""
    return min(keys, key=lambda other: (abs(other[0] - key[0]), abs(other[1] - key[1])))


class CostCurve:
    """Monotone piecewise-linear times by work, with one slope beyond the measured range."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._kept: list[deque[tuple[float, float]]] = []
        self._found: list[tuple[float, float]] = []
        """By key: the median work of the samples, and the lower quartile of their times."""
        self._points: list[tuple[float, float]] = []
        """The same, made monotone."""

    def add(self, width: int, work: float, time: float) -> None:
        """Add a time. Widths with the same key share a point."""
        key = _width_key(width)
        i = bisect_left(self._keys, key)
        if i == len(self._keys) or self._keys[i] != key:
            self._keys.insert(i, key)
            self._kept.insert(i, deque(maxlen=KEPT_WIDTH))
            self._found.insert(i, (work, time))
        kept = self._kept[i]
        kept.append((work, time))
        middle = median(time for time, _ in kept) if key > EXACT else work
        self._found[i] = middle, quiet([time for _, time in kept])
        self._points = self._rising()

    def _rising(self) -> list[tuple[float, float]]:
        """Pool decreasing neighbours, weighted by samples: a wider step cannot cost less."""
        pools: list[tuple[float, int, int]] = []
        for (_, time), kept in zip(self._found, self._kept, strict=True):
            weight, points = len(kept), 1
            while pools and pools[-1][0] > time:
                before, size, count = pools.pop()
                time = (before * size + time * weight) / (size + weight)
                weight, points = size + weight, points + count
            pools.append((time, weight, points))
        times = [time for time, _, points in pools for _ in range(points)]
        return [(work, time) for (work, _), time in zip(self._found, times, strict=True)]

    def settled(self, width: int) -> float | None:
        """Return the time at a width with enough samples, or None."""
        key = _width_key(width)
        i = bisect_left(self._keys, key)
        is_settled = i < len(self._keys) and self._keys[i] == key and len(self._kept[i]) > KEPT // 2
        return self._found[i][1] if is_settled else None

    @property
    def slope(self) -> float | None:
        """Return the slope from the narrowest to the widest width; None with fewer than two widths."""
        if len(self._points) < 2:
            return None
        (low, low_s), (high, high_s) = self._points[0], self._points[-1]
        return (high_s - low_s) / (high - low)

    def at(self, work: float, slope: float) -> float:
        """Return the time of an amount of work; `slope` applies beyond the measured range."""
        points = self._points
        i = bisect_left(points, (work, 0.0))
        if 0 < i < len(points):
            (low, low_s), (high, high_s) = points[i - 1], points[i]
            return low_s + (high_s - low_s) * (work - low) / (high - low)
        nearest, time = points[0 if i == 0 else -1]
        return max(time + slope * (work - nearest), 0.0)


def bucket(count: int) -> int:
    """Return a key shared by counts within a fifth of each other."""
    return round(4 * log2(count))


def _width_key(width: int) -> int:
    """Return a key: exact for narrow widths, where a token may cost a kernel tile, bucketed for wide ones."""
    return width if width <= EXACT else EXACT + bucket(width)
