"""What a step costs, learnt from the steps themselves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable
from math import log2
from statistics import median

KEPT = 7
"""Samples that count: enough to ignore hiccups, few enough to follow the machine."""
KEPT_WIDTH = 32
"""Samples of one width against others: more, for what widths cost beside each other changes slowly."""

EXACT = 64
TICK_S = 1e-9
"""The least that anything takes: a clock may be too coarse to see it."""
STALE = 200
"""Steps after which an older time says nothing of the machine as it is."""
GROUP = 0.01
"""What rows of one more width are taken to cost, of a step, until that was measured."""

Work = Callable[[int], float]
"""Gives the work of a number of tokens beside one's: a step that is twice as wide is not twice the work."""


def quiet(times: Collection[float]) -> float:
    """Return the lower quartile of times: other work on the machine makes them longer, never shorter.

    Of few that were taken beside a busy neighbour, the middle one may be several times too long.
    """
    return sorted(times)[(len(times) - 1) // 4]


class Samples:
    """Remember the last times of each cell."""

    def __init__(self) -> None:
        self._cells: dict[Hashable, deque[float]] = {}
        self._quiet: dict[Hashable, float] = {}

    def add(self, cell: Hashable, seconds: float) -> None:
        """Note one time."""
        kept = self._cells.setdefault(cell, deque(maxlen=KEPT))
        kept.append(seconds)
        self._quiet[cell] = quiet(kept)

    def get(self, cell: Hashable) -> float | None:
        """Return what it took in a quiet moment of the last times, or None."""
        return self._quiet.get(cell)


class Costs:
    """Predict the seconds of work on rows, by its width: a verify step's tokens, a draft's levels.

    Work on about as many rows, of as many widths, shares a line through what each total was found to take.
    Where none was done, the line of the nearest number of rows serves; a line of one point has the slope of
    the nearest with two. Lines are straight in `work`.

    Machines get busy and quiet again, and contexts grow. That moves all widths alike, and mostly one of them
    is at work: so times are kept as multiples of a pace, which is quick, and multiples are slow to change.
    Both are those of quiet moments: what else runs lengthens all work in proportion.
    """

    def __init__(self, work: Work = float) -> None:
        self._work = work
        self._lines: dict[tuple[int, int], Line] = {}
        """By the bucket of rows, and by how many widths they have."""
        self._ratios: deque[float] = deque([1.0], maxlen=KEPT)
        self.pace = 1.0
        """How the machine is now: what everything takes beside what it took while multiples were learnt."""

    def observe(self, rows: int, width: int, seconds: float, groups: int = 1) -> None:
        """Note what some work took; of a step: by its rows, tokens, and groups of rows of one width."""
        line = self._lines.setdefault((bucket(rows), groups), Line())
        seconds = max(seconds, TICK_S)
        if known := line.settled(width):
            self._ratios.append(seconds / known)
            self.pace = quiet(self._ratios)
        line.add(width, self._work(width), seconds / self.pace)

    def predict(self, rows: int, width: int, groups: int = 1) -> float:
        """Return seconds; 0 while nothing is known."""
        return self.curve(rows, groups)(width)

    def curve(self, rows: int, groups: int = 1) -> Callable[[int], float]:
        """Return `predict` by widths alone, as long as nothing new is observed."""
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
            sloped = {own: other.slope for own, other in self._lines.items() if other.slope is not None}
            slope = sloped[_nearest(sloped, key)] if sloped else 0.0
        at, work = line.at, self._work
        return lambda width: scale * at(work(width), slope)

    def knows(self, rows: int, width: int) -> bool:
        """Return whether this work was measured often enough to trust the estimate."""
        line = self._lines.get((bucket(rows), 1))
        return line is not None and line.settled(width) is not None


def _nearest(known: Collection[tuple[int, int]], key: tuple[int, int]) -> tuple[int, int]:
    """Return the key of about as many rows, and of these that of about as many groups."""
    return min(known, key=lambda own: (abs(own[0] - key[0]), abs(own[1] - key[1])))


class Line:
    """Times by work: straight between those measured, with one slope beyond them, and never falling."""

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._kept: list[deque[tuple[float, float]]] = []
        self._found: list[tuple[float, float]] = []
        """By key: the work in the middle of what is kept, and a quiet time."""
        self._points: list[tuple[float, float]] = []
        """The same, as a line that never falls."""

    def add(self, width: int, work: float, time: float) -> None:
        """Note one time. Widths of one key share a point."""
        key = _width_key(width)
        i = bisect_left(self._keys, key)
        if i == len(self._keys) or self._keys[i] != key:
            self._keys.insert(i, key)
            self._kept.insert(i, deque(maxlen=KEPT_WIDTH))
            self._found.insert(i, (work, time))
        kept = self._kept[i]
        kept.append((work, time))
        middle = median(own for own, _ in kept) if key > EXACT else work
        self._found[i] = middle, quiet([own for _, own in kept])
        self._points = self._rising()

    def _rising(self) -> list[tuple[float, float]]:
        """Put neighbours together that fall, each as heavy as it has samples: the wider cannot cost less."""
        pools: list[tuple[float, int, int]] = []
        for (_, time), kept in zip(self._found, self._kept, strict=True):
            weight, points = len(kept), 1
            while pools and pools[-1][0] > time:
                before, own, count = pools.pop()
                time = (before * own + time * weight) / (own + weight)
                weight, points = own + weight, points + count
            pools.append((time, weight, points))
        times = [time for time, _, points in pools for _ in range(points)]
        return [(work, time) for (work, _), time in zip(self._found, times, strict=True)]

    def settled(self, width: int) -> float | None:
        """Return the time at a width that was tried often enough to be trusted."""
        key = _width_key(width)
        i = bisect_left(self._keys, key)
        known = i < len(self._keys) and self._keys[i] == key and len(self._kept[i]) > KEPT // 2
        return self._found[i][1] if known else None

    @property
    def slope(self) -> float | None:
        """Return what more work adds, from the narrowest width to the widest; None with fewer than two."""
        if len(self._points) < 2:
            return None
        (low, low_s), (high, high_s) = self._points[0], self._points[-1]
        return (high_s - low_s) / (high - low)

    def at(self, work: float, slope: float) -> float:
        """Return the time of an amount of work."""
        points = self._points
        i = bisect_left(points, (work, 0.0))
        if 0 < i < len(points):
            (low, low_s), (high, high_s) = points[i - 1], points[i]
            return low_s + (high_s - low_s) * (work - low) / (high - low)
        nearest, time = points[0 if i == 0 else -1]
        return max(time + slope * (work - nearest), 0.0)


def bucket(count: int) -> int:
    """Put counts within a fifth of each other together."""
    return round(4 * log2(count))


def _width_key(width: int) -> int:
    """Return a key that separates narrow widths, where a token may cost a tile, and groups wide ones."""
    return width if width <= EXACT else EXACT + bucket(width)
