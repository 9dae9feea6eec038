"""Notice cheaply that a text repeats itself: reason to look it up while that is seldom done."""

from collections.abc import Sequence

LENGTH = 8
"""Tokens in a row that occurred before: few texts repeat that many by chance."""


class Echo:
    """Remembers every `LENGTH` tokens of one text by their hash."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.indexed = 0
        """Number of tokens in the index."""

    def repeats(self, tokens: Sequence[int], most: int) -> bool:
        """Index at most `most` further tokens; return whether the text ends in an earlier part of it."""
        end = min(len(tokens), self.indexed + most)
        new = tokens[max(self.indexed - LENGTH + 1, 0) : end]
        gained, self.indexed = end - self.indexed, end
        if len(new) < LENGTH or not gained:
            return False
        *others, last = map(hash, zip(*(new[i:] for i in range(LENGTH)), strict=False))
        self._seen.update(others)
        is_known = last in self._seen
        self._seen.add(last)
        return is_known and end == len(tokens)
