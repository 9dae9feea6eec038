"""Detect shared passages: a held-out text that also occurs in a training text measures memorisation."""

import re
from collections.abc import Iterable

PASSAGE, STRIDE = 150, 50
"""Passages are indexed at every STRIDE-th character: any 199 characters of a text contain one."""


class Passages:
    """An index of texts' passages, to find other texts that share 200 characters or more."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._known: set[int] = set()
        for text in texts:
            folded = _fold(text)
            starts = range(0, len(folded) - PASSAGE + 1, STRIDE)
            self._known.update(hash(folded[at : at + PASSAGE]) for at in starts)

    def shared_with(self, text: str) -> bool:
        """Return whether a text contains an indexed passage, ignoring line breaks."""
        folded = _fold(text)
        starts = range(len(folded) - PASSAGE + 1)
        return any(hash(folded[at : at + PASSAGE]) in self._known for at in starts)


def _fold(text: str) -> str:
    return re.sub(r"\s+", " ", text)
