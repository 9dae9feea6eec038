"""Cheap detection of repeated text, used to trigger look-ups while these are rare."""

from collections.abc import Sequence

LENGTH = 8
"""Length of a repeat, in tokens; few texts repeat that many by chance."""


class RepetitionIndex:
    """Hashes of every `LENGTH` consecutive tokens of one text."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self.indexed = 0
        """Number of tokens in the index."""

    def repeats(self, tokens: Sequence[int], limit: int) -> bool:
        """Index at most `most` further tokens; return whether the last `LENGTH` tokens occurred before."""
        end = min(len(tokens), self.indexed + limit)
        new = tokens[max(self.indexed - LENGTH + 1, 0) : end]
        gained, self.indexed = end - self.indexed, end
        if len(new) < LENGTH or not gained:
            return False
        *others, last = map(hash, zip(*(new[i:] for i in range(LENGTH)), strict=False))
        self._seen.update(others)
        is_known = last in self._seen
        self._seen.add(last)
        return is_known and end == len(tokens)
