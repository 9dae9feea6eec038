"""Choose how many draft nodes each row verifies, from their expected gain and the step cost.

Rows of one width form a group of the window, and each group has a cost. So rows are cut to at most three
widths, plus 0; a shorter draft keeps its own. Nodes are selected over all rows together, the best first.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter

from specdec.draft.proposal import Proposal

MARGIN = 1.02
"""Minimum gain over no draft, so that small estimation errors cost nothing."""
WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Candidate widths: few, so that the cost of each is known soon."""
APART = 2
"""Distance in `WIDTHS` between the widths of one step: a factor of about two."""

Curve = Callable[[int], float]
"""Maps the number of verified nodes to the step's seconds."""


@dataclass(frozen=True, slots=True)
class WidthCut:
    """Number of nodes verified per row, the resulting tokens per second, and the step's seconds."""

    widths: tuple[int, ...]
    rate: float
    seconds: float

    @property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def groups(self) -> int:
        """Number of distinct widths, 0 included."""
        return len(set(self.widths))


def best_cut(sums: Sequence[Sequence[float]], curve: Callable[[int], Curve], *, mixed: bool) -> WidthCut:
    """Return the cut with the most tokens per second; `sums` holds each row's `gains`.

    `curve` maps `WidthCut.groups` to a cost curve. Single widths are tried first; if rows may be `mixed`,
    each row then chooses among the best of these, a smaller and a larger one.
    """
    curve = functools.cache(curve)
    none = _cut([0] * len(sums), float(len(sums)), curve)
    lengths = [len(row_sums) - 1 for row_sums in sums]
    if not (longest := max(lengths)):
        return none
    # Pad: nodes beyond the draft add nothing.
    padded = [
        [*row_sums, *[row_sums[-1]] * (longest - length)]
        for row_sums, length in zip(sums, lengths, strict=True)
    ]
    levels = [*(nodes for nodes in WIDTHS if nodes < longest), longest]
    top, at, chosen = MARGIN * none.rate, 0, 0
    for i, level in enumerate(levels):
        falling = sorted([row_sums[level] for row_sums in padded], reverse=True)
        tokens = list(accumulate(falling, initial=float(len(sums))))
        for count in counts(len(sums)):
            pace = rate(tokens[count], curve(1 + (count < len(sums)))(count * level))
            if pace > top:
                top, at, chosen = pace, i, count
    if not chosen:
        return none
    kept = highest([row_sums[levels[at]] for row_sums in padded], chosen)
    widths = [min(levels[at], length) * (row in kept) for row, length in enumerate(lengths)]
    best = _cut(widths, len(sums) + sum(padded[row][levels[at]] for row in kept), curve)
    if mixed and len(sums) > 1:
        around = sorted({max(at - APART, 0), at, min(at + APART, len(levels) - 1)})
        several = _spend(padded, lengths, [levels[i] for i in around], curve)
        best = max(best, several, key=attrgetter("rate"))
    return best if best.rate > MARGIN * none.rate else none


def _spend(
    sums: Sequence[Sequence[float]],
    lengths: Sequence[int],
    levels: Sequence[int],
    curve: Callable[[int], Curve],
) -> WidthCut:
    """Widen rows from level to level, those with the largest gain per node first, and return the best cut."""
    pieces = [
        ((row_sums[upto] - row_sums[below]) / (min(upto, length) - below), min(upto, length) - below, row)
        for below, upto in pairwise((0, *levels))
        for row, (row_sums, length) in enumerate(zip(sums, lengths, strict=True))
        if length > below
    ]
    pieces.sort(key=itemgetter(0), reverse=True)
    widths, count_of = [0] * len(sums), [0] * (levels[-1] + 1)
    count_of[0], groups, nodes, tokens = len(sums), 1, 0, float(len(sums))
    totals: list[tuple[float, int, int]] = []
    for gain, more, row in pieces:
        width = widths[row]
        count_of[width] -= 1
        groups += (not count_of[width + more]) - (not count_of[width])
        widths[row] += more
        count_of[width + more] += 1
        nodes, tokens = nodes + more, tokens + gain * more
        totals.append((tokens, nodes, groups))

    def rate_of(count: int) -> tuple[float, int]:
        tokens, nodes, groups = totals[count - 1]
        return rate(tokens, curve(groups)(nodes)), count

    best, count = max(map(rate_of, counts(len(pieces))))
    step = count // 2
    while step:
        near = [n for n in (count - step, count + step) if n <= len(pieces)]
        best, count = max((best, count), *map(rate_of, near))
        step //= 2
    widths = [0] * len(sums)
    for _, more, row in pieces[:count]:
        widths[row] += more
    return _cut(widths, totals[count - 1][0], curve)


def _cut(widths: Sequence[int], tokens: float, curve: Callable[[int], Curve]) -> WidthCut:
    """Return the cut with these widths and expected tokens."""
    took_s = curve(len(set(widths)))(sum(widths))
    return WidthCut(tuple(widths), rate(tokens, took_s), took_s)


def gains(proposal: Proposal) -> list[float]:
    """Return the expected tokens of the best 0, 1, 2 … nodes."""
    return list(accumulate(sorted(proposal.scores[1:], reverse=True), initial=0.0))


def highest(values: Sequence[float], count: int) -> set[int]:
    """Return the indices of the highest values; ties go to the earlier."""
    return set(sorted(range(len(values)), key=lambda i: -values[i])[:count])


def counts(total: int) -> Iterator[int]:
    """Yield 1, 2, 4 … and the total."""
    count = 1
    while count < total:
        yield count
        count *= 2
    yield total


def rate(tokens: float, seconds: float) -> float:
    """Return tokens per second."""
    return tokens / max(seconds, 1e-9)
