"""How many drafted nodes each row verifies: chosen by what nodes are expected to bring, and what steps cost.

Rows of one width are one group of the window, and a further group costs something. So rows have one of three
widths at most, beside those that verify nothing. Nodes are bought for all rows together, the best ones first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter

from specdec.draft.proposal import Proposal

MARGIN = 1.02
"""How much better than none a draft must look: an estimate that is off by less must not cost anything."""
WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)
"""Numbers of nodes that are tried: few, so that the cost of each is known soon."""
APART = 2
"""How far the widths of one step lie apart in that list: a factor of about two."""

Curve = Callable[[int], float]
"""Says what a step takes that verifies so many nodes."""


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
    rows, lengths = len(sums), [len(own) - 1 for own in sums]
    alone, none = curve(1), (0,) * len(sums)
    best = nothing = Cut(none, rate(rows, alone(0)), alone(0))
    if not (longest := max(lengths)):
        return nothing
    # As long as the longest: further nodes bring nothing.
    padded = [[*own, *[own[-1]] * (longest - length)] for own, length in zip(sums, lengths, strict=True)]
    levels, pair = [*(nodes for nodes in WIDTHS if nodes < longest), longest], curve(2)
    at, chosen = 0, 0
    for i, level in enumerate(levels):
        total = list(accumulate(sorted([own[level] for own in padded], reverse=True), initial=float(rows)))
        for count in counts(rows):
            took_s = (alone if count == rows else pair)(count * level)
            if (own := rate(total[count], took_s)) > best.rate:
                best, at, chosen = Cut(none, own, took_s), i, count
    if best.rate <= MARGIN * nothing.rate:
        return nothing
    if mixed and rows > 1:
        around = sorted({max(at - APART, 0), at, min(at + APART, len(levels) - 1)})
        several = _spend(padded, lengths, [levels[i] for i in around], curve)
        if several.rate > best.rate:
            return several
    kept = highest([own[levels[at]] for own in padded], chosen)
    widths = [min(levels[at], length) * (row in kept) for row, length in enumerate(lengths)]
    return replace(best, widths=tuple(widths))


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
    curves = {own: curve(own) for own in {own for _, _, own in totals}}

    def rate_of(count: int) -> tuple[float, int]:
        tokens, nodes, groups = totals[count - 1]
        return rate(tokens, curves[groups](nodes)), count

    found, count = max(map(rate_of, counts(len(pieces))))
    step = count // 2
    while step:
        near = [own for own in (count - step, count + step) if own <= len(pieces)]
        found, count = max((found, count), *map(rate_of, near))
        step //= 2
    widths = [0] * len(sums)
    for _, more, row in pieces[:count]:
        widths[row] += more
    _, nodes, groups = totals[count - 1]
    return Cut(tuple(widths), found, curves[groups](nodes))


def gains(proposal: Proposal) -> list[float]:
    """Say how many tokens the best 0, 1, 2 … nodes are expected to bring."""
    return list(accumulate(sorted(proposal.scores, reverse=True), initial=0.0))


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
