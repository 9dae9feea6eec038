"""Notice, for next to nothing, that a text repeats itself: reason to look it up while that is seldom done."""

from collections.abc import Sequence

LENGTH = 8
"""Tokens in a row that were said before: few texts repeat so many by chance."""


class Echo:
    """Remembers every `LENGTH` tokens of one text by their hash."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.heard = 0
        """Number of tokens in the index."""

    def hears(self, tokens: Sequence[int]) -> bool:
        """Take in what a text has gained; tell whether it now ends in what it said before."""
        new = tokens[max(self.heard - LENGTH + 1, 0) :]
        if len(new) < LENGTH or len(tokens) == self.heard:
            return False
        *others, last = map(hash, zip(*(new[i:] for i in range(LENGTH)), strict=False))
        self._seen.update(others)
        is_known = last in self._seen
        self._seen.add(last)
        self.heard = len(tokens)
        return is_known
