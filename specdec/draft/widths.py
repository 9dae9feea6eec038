"""How many drafted nodes each row verifies: chosen by what nodes are expected to bring, and what steps cost.

Rows of one width are one group of the window, and a further group costs something. So rows are cut to one of
three widths at most, beside those that verify nothing; a draft that is shorter keeps its own. Nodes are
bought for all rows together, the best ones first.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter

from specdec.draft.proposal import Proposal

MARGIN = 1.02
"""How much better than none a draft must look: an estimate that is off by less must not cost anything."""
WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Numbers of nodes that are tried: few, so that the cost of each is known soon."""
APART = 2
"""How far the widths of one step lie apart in that list: a factor of about two."""

Curve = Callable[[int], float]
"""Gives the time of a step by the nodes that it verifies."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How many nodes each row verifies, the tokens a second that this gives, and what it takes."""

    widths: tuple[int, ...]
    rate: float
    seconds: float

    @property
    def nodes(self) -> int:
        return sum(self.widths)

    @property
    def groups(self) -> int:
        """Count the widths that rows have, none included."""
        return len(set(self.widths))


def best_cut(sums: Sequence[Sequence[float]], curve: Callable[[int], Curve], *, mixed: bool) -> Cut:
    """Return what gives most tokens a second; `sums` has `gains` for each row, `curve` is by `Cut.groups`.

    One width is tried after the other. Where rows may be `mixed`, they then choose between the best of these,
    a smaller and a larger one.
    """
    curve = functools.cache(curve)
    none = _cut([0] * len(sums), float(len(sums)), curve)
    lengths = [len(own) - 1 for own in sums]
    if not (longest := max(lengths)):
        return none
    # Further nodes than there are bring nothing.
    padded = [[*own, *[own[-1]] * (longest - length)] for own, length in zip(sums, lengths, strict=True)]
    levels = [*(nodes for nodes in WIDTHS if nodes < longest), longest]
    top, at, chosen = MARGIN * none.rate, 0, 0
    for i, level in enumerate(levels):
        falling = sorted([own[level] for own in padded], reverse=True)
        tokens = list(accumulate(falling, initial=float(len(sums))))
        for count in counts(len(sums)):
            found = rate(tokens[count], curve(1 + (count < len(sums)))(count * level))
            if found > top:
                top, at, chosen = found, i, count
    if not chosen:
        return none
    kept = highest([own[levels[at]] for own in padded], chosen)
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
) -> Cut:
    """Widen rows from level to level while that pays, those first that gain most by each node."""
    pieces = [
        ((own[upto] - own[below]) / (min(upto, length) - below), min(upto, length) - below, row)
        for below, upto in pairwise((0, *levels))
        for row, (own, length) in enumerate(zip(sums, lengths, strict=True))
        if length > below
    ]
    pieces.sort(key=itemgetter(0), reverse=True)
    widths, alike = [0] * len(sums), [0] * (levels[-1] + 1)
    alike[0], groups, nodes, tokens = len(sums), 1, 0, float(len(sums))
    totals: list[tuple[float, int, int]] = []
    for each, more, row in pieces:
        width = widths[row]
        alike[width] -= 1
        groups += (not alike[width + more]) - (not alike[width])
        widths[row] += more
        alike[width + more] += 1
        nodes, tokens = nodes + more, tokens + each * more
        totals.append((tokens, nodes, groups))

    def rate_of(count: int) -> tuple[float, int]:
        tokens, nodes, groups = totals[count - 1]
        return rate(tokens, curve(groups)(nodes)), count

    best, count = max(map(rate_of, counts(len(pieces))))
    step = count // 2
    while step:
        near = [own for own in (count - step, count + step) if own <= len(pieces)]
        best, count = max((best, count), *map(rate_of, near))
        step //= 2
    widths = [0] * len(sums)
    for _, more, row in pieces[:count]:
        widths[row] += more
    return _cut(widths, totals[count - 1][0], curve)


def _cut(widths: Sequence[int], tokens: float, curve: Callable[[int], Curve]) -> Cut:
    """Return the cut of rows to these widths, which bring this many tokens."""
    took_s = curve(len(set(widths)))(sum(widths))
    return Cut(tuple(widths), rate(tokens, took_s), took_s)


def gains(proposal: Proposal) -> list[float]:
    """Return how many tokens the best 0, 1, 2 … nodes are expected to bring."""
    return list(accumulate(sorted(proposal.scores[1:], reverse=True), initial=0.0))


def highest(values: Sequence[float], count: int) -> set[int]:
    """Return where the highest values are; of equals the earlier are taken."""
    return set(sorted(range(len(values)), key=lambda i: -values[i])[:count])


def counts(total: int) -> Iterator[int]:
    """Yield 1, 2, 4 … and the total."""
    count = 1
    while count < total:
        yield count
        count *= 2
    yield total


def rate(tokens: float, seconds: float) -> float:
    """Return tokens a second."""
    return tokens / max(seconds, 1e-9)
