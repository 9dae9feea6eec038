"""Notice, for next to nothing, that a text repeats itself: reason to look it up while that is seldom done."""

from collections.abc import Sequence

LENGTH = 8
"""Tokens in a row that were said before: few texts repeat so many by chance."""


class Echo:
    """Remembers every `LENGTH` tokens of one text by their hash."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._heard = LENGTH - 1

    def hears(self, tokens: Sequence[int]) -> bool:
        """Take in what a text has gained; tell whether it now ends in what it said before."""
        seen, is_known = self._seen, False
        for end in range(self._heard + 1, len(tokens) + 1):
            ngram = hash(tuple(tokens[end - LENGTH : end]))
            is_known = ngram in seen
            seen.add(ngram)
        self._heard = max(self._heard, len(tokens))
        return is_known
