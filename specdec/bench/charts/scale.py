"""From values to places: axes with round ticks, linear or logarithmic, and figures as people write them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

LADDERS = ((1,), (1, 2, 5), (1, 2, 3, 5, 7), (1, 2, 3, 4, 5, 6, 7, 8, 9))
"""Mantissas of a logarithmic axis' ticks, from coarse to fine."""
FEWEST = 4
"""Ticks under which an axis takes finer steps."""
LETTERS = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which size on a figure is written in which unit."""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis: values from `low` to `high` lie between two places of the picture."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False
    start: float = 0.0
    end: float = 1.0

    def between(self, start: float, end: float) -> "Scale":
        return replace(self, start=start, end=end)

    def place(self, value: float) -> float:
        low, high, at = (
            map(math.log10, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def fit(
    values: Iterable[float | None],
    *,
    log: bool = False,
    most: int = 8,
    whole: bool = False,
    tight: bool = False,
) -> Scale:
    """Span the values by an axis with round ticks, none between integers where it is `whole`.

    A linear axis ends at ticks unless it is `tight`; a logarithmic one always ends where the values do.
    """
    found = [v for v in values if v is not None and is_drawn(v, log=log)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0) if log else (0.0, 1.0)
    if log and high < low * 1.01:
        low, high = low / 1.5, high * 1.5
    ticks = log_ticks(low, high, most) if log else linear_ticks(low, high, most, least_step=float(whole))
    if log or (tight and low < high):
        return Scale(low, high, tuple(t for t in ticks if low <= t <= high) or (low, high), log)
    return Scale(ticks[0], ticks[-1], tuple(ticks))


def is_drawn(value: float | None, *, log: bool = False) -> bool:
    """Say whether a value has a place on an axis; what has none leaves a gap."""
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def linear_ticks(low: float, high: float, most: int, *, least_step: float = 0.0) -> list[float]:
    """Return at most `most` multiples of 1, 2 or 5 times a power of ten that enclose both ends."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(high) / 10 or 0.5
        low, high = low - room, high + room
    rough = max((high - low) / max(most - 1, 1), least_step)
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * power
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if step >= rough * (1 - 1e-9) and last - first < most:
            break
    # Dividing by a whole number keeps 0.3 from becoming 0.30000000000000004.
    return [i * step if step >= 1 else i / (1 / step) for i in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` ticks between both ends: decades where there are many, else steps within them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for ladder in LADDERS:
        ticks = [m * 10.0**power for power in powers for m in ladder if low <= m * 10.0**power <= high]
        if len(ticks) > most:
            break
        found = ticks
        if len(found) >= FEWEST:
            return found
    if len(found) > 1:
        return found
    # Many decades keep some of them; a part of one is divided evenly.
    stride = math.ceil(len(powers) / most)
    return [10.0**p for p in powers[::stride]] if stride > 1 else linear_ticks(low, high, most)


def number(value: float | None) -> str:
    """Write a figure shortly, large ones in thousands: 0.873, 12.4, 1,250, 48k, 3.2M."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for least, unit, letter in LETTERS:
        if size >= least:
            return f"{_plain(value / unit, 1)}{letter}"
    if size and size < 1e-3:
        return f"{value:.2g}".replace("-", "−").replace("e−0", "e−")
    return _plain(value, 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3)


def percent(value: float | None) -> str:
    """Write a share as a percentage."""
    return "–" if value is None or not math.isfinite(value) else f"{_plain(value * 100, 1)} %"


def times(value: float | None) -> str:
    """Write a ratio with two decimals."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}×"


def _plain(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text.replace("-", "−")


def spaced(scale: Scale, label: Format, width_of: Callable[[str], float], room: float) -> Sequence[float]:
    """Return as many of an axis' ticks as can stand beside each other with their labels."""
    ticks = scale.ticks
    for stride in range(1, len(ticks) + 1):
        kept = ticks[::stride]
        places = [(scale.place(t), width_of(label(t)) / 2) for t in kept]
        if all(b - a >= half + other + room for (a, half), (b, other) in pairwise(places)):
            return kept
    return ticks[:1]
