"""Token counts for penalties: the distinct tokens of a prompt and its output."""

from array import array
from collections.abc import Sequence


class OutputCounts:
    """Distinct tokens of one request and their counts in its output, as columns.

    Penalty cost depends on their number, not on the vocabulary.
    """

    __slots__ = ("_place", "counts", "tokens")

    def __init__(self, prompt: Sequence[int]) -> None:
        self._place = {token: column for column, token in enumerate(dict.fromkeys(prompt))}
        self.tokens = array("i", self._place)
        self.counts = array("f", bytes(4 * len(self.tokens)))

    def observe(self, token: int) -> None:
        """Count an output token."""
        column = self._place.setdefault(token, len(self.tokens))
        if column == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0.0)
        self.counts[column] += 1

    def along(self, path: Sequence[int]) -> tuple["array[int]", "array[float]"]:
        """Return the columns as if the output continued along a path."""
        if not path:
            return self.tokens, self.counts
        tokens, counts = self.tokens[:], self.counts[:]
        new: dict[int, int] = {}
        for token in path:
            column = self._place.get(token)
            if column is None:
                column = new.setdefault(token, len(tokens))
            if column == len(tokens):
                tokens.append(token)
                counts.append(0.0)
            counts[column] += 1
        return tokens, counts
