"""Few rows that hold each pair of values: what a table's product is thinned to."""

import itertools
from collections.abc import Sequence

Row = tuple[str, ...]


def pairs(row: Row) -> set[tuple[tuple[int, str], ...]]:
    """List what a row says of each two of its axes."""
    return set(itertools.combinations(enumerate(row), 2))


def covering(rows: Sequence[Row]) -> list[Row]:
    """Choose rows, each the first of those that add most, until they hold each pair that any row holds."""
    own = {row: pairs(row) for row in rows}
    missing, chosen = set().union(*own.values()), list[Row]()
    while missing:
        chosen.append(max(rows, key=lambda row: len(own[row] & missing)))
        missing -= own[chosen[-1]]
    return chosen
