"""Tell a text that goes in circles: what it says is easy to draft, and no measure of a drafter."""

from collections.abc import Sequence

AROUND = 3
"""How often the last half must go round."""


def loops(tokens: Sequence[int]) -> bool:
    """Tell whether the last half of an output repeats, with a period of at most a third of that half."""
    last = tokens[len(tokens) // 2 :]
    return any(last[period:] == last[:-period] for period in range(1, len(last) // AROUND + 1))
