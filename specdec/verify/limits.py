"""What of the vocabulary a node may choose from: sets of tokens as words of 32 bits."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

WORD = 32


class Limit(Protocol):
    """Bounds one request's choices. It hears of every token that the request accepts."""

    fault: str | None
    """Why the output cannot go on, if it is at a place where nothing may follow and is no end."""

    @property
    def is_over(self) -> bool:
        """Tell whether no token may follow: the output has reached its end."""

    def words(self, path: Sequence[int]) -> Tensor | None:
        """Return what may follow the output and a path of drafted tokens, as int32 [W]; None: everything.

        Everything, too, where the path itself goes where none may: no choice will ever reach it.
        """

    def observe(self, token: int) -> bool:
        """Take a token that was accepted; tell whether later ones are still bounded."""


class NotYet:
    """Forbids the tokens that end an output until it has some length."""

    is_over = False
    fault: str | None = None

    def __init__(self, ends: Collection[int], least: int, vocab: int) -> None:
        self.left = least
        self._words_W = _all_but(ends, vocab)

    def words(self, path: Sequence[int]) -> Tensor | None:
        return self._words_W if len(path) < self.left else None

    def observe(self, token: int) -> bool:
        self.left -= 1
        return self.left > 0


def bounded_words(limits: Sequence[Limit], path: Sequence[int]) -> Tensor | None:
    """Return what all limits allow, None: everything. One that would leave nothing yields to those before."""
    words_W: Tensor | None = None
    for limit in limits:
        own_W = limit.words(path)
        if own_W is not None:
            both_W = own_W if words_W is None else words_W & own_W
            words_W = both_W if both_W.any() else words_W
    return words_W


def _all_but(tokens: Collection[int], vocab: int) -> Tensor:
    """Return words in which all tokens stand but some."""
    words = [-1] * -(-vocab // WORD)
    for token in tokens:
        words[token // WORD] &= ~(1 << token % WORD)
    signed = [word - (word > 0x7FFFFFFF) * (1 << 32) for word in (w & 0xFFFFFFFF for w in words)]
    return torch.tensor(signed, dtype=torch.int32)
