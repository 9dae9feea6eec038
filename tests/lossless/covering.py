"""Pairwise covering: thin a product to few rows that contain each pair of values."""

import itertools
from collections.abc import Sequence

Row = tuple[str, ...]


def pairs(row: Row) -> set[tuple[tuple[int, str], ...]]:
    """Return the pairs of values in a row, by axis."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(rows: Sequence[Row]) -> list[Row]:
    """Greedily choose rows that add most pairs, until every pair of any row is covered."""
    own = {row: pairs(row) for row in rows}
    missing, chosen = set().union(*own.values()), list[Row]()
    while missing:
        chosen.append(max(rows, key=lambda row: len(own[row] & missing)))
        missing -= own[chosen[-1]]
    return chosen
