"""Find what texts share: a held-out text that stands in a training one as well measures memory."""

import re
from collections.abc import Iterable

PASSAGE, STRIDE = 150, 50
"""Passages known are those at every STRIDE-th character: one of them lies in any 199 characters of a text."""


class Passages:
    """Know texts by their passages, to find what else holds one of 200 characters or more."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._known: set[int] = set()
        for text in texts:
            folded = _fold(text)
            starts = range(0, len(folded) - PASSAGE + 1, STRIDE)
            self._known.update(hash(folded[at : at + PASSAGE]) for at in starts)

    def shared_with(self, text: str) -> bool:
        """Tell whether a text has a passage of these; how it is broken into lines does not matter."""
        folded = _fold(text)
        starts = range(len(folded) - PASSAGE + 1)
        return any(hash(folded[at : at + PASSAGE]) in self._known for at in starts)


def _fold(text: str) -> str:
    return re.sub(r"\s+", " ", text)
