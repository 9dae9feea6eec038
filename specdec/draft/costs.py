"""What a step costs, learnt from the steps themselves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from math import log2
from statistics import median

KEPT = 7
"""Samples of a cell whose median counts: enough to ignore a hiccup, few enough to follow the machine."""


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

    What was never measured is guessed from steps of one row, which are measured at start: what so many tokens
    cost there, plus what so many rows were found to cost beyond it.
    """

    def __init__(self) -> None:
        self._cells = Samples()
        self._alone = Samples()
        self._alone_widths: list[int] = []
        self._beyond = Samples()

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Note what a step took."""
        if rows == 1:
            if tokens not in self._alone_widths:
                self._alone_widths.insert(bisect_left(self._alone_widths, tokens), tokens)
            self._alone.add(tokens, seconds)
            return
        self._cells.add((bucket(rows), bucket(tokens)), seconds)
        if self._alone_widths:
            self._beyond.add(bucket(rows), seconds - self._one_row(tokens))

    def predict(self, rows: int, tokens: int) -> float:
        """Return seconds; 0 while nothing is known."""
        if not self._alone_widths:
            return self._cells.get((bucket(rows), bucket(tokens))) or 0.0
        if rows == 1:
            return self._one_row(tokens)
        found = self._cells.get((bucket(rows), bucket(tokens)))
        if found is not None:
            return found
        return self._one_row(tokens) + max(self._beyond.get(bucket(rows)) or 0.0, 0.0)

    def _one_row(self, tokens: int) -> float:
        """Interpolate between the widths measured; beyond the widest, cost grows with the tokens."""
        widths = self._alone_widths
        at = bisect_left(widths, tokens)
        if at == len(widths):
            return self._median(widths[-1]) * tokens / widths[-1]
        high = widths[at]
        if at == 0 or high == tokens:
            return self._median(high)
        low = widths[at - 1]
        part = (tokens - low) / (high - low)
        return self._median(low) * (1 - part) + self._median(high) * part

    def _median(self, width: int) -> float:
        found = self._alone.get(width)
        assert found is not None
        return found


def bucket(count: int) -> int:
    """Put counts within a fifth of each other together."""
    return round(4 * log2(count))
