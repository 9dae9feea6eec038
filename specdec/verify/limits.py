"""Vocabulary masks: sets of tokens as 32-bit words."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

INVERTED = bytes(reversed(range(256)))
"""Translation table that inverts all bits of a byte."""


class TokenLimit(Protocol):
    """Restricts one request's choices. It observes every token that the request accepts.

    Masks may take time to compute: they are requested, waited for briefly, and then known or not. It stores
    bytes, not tensors: a caller's thread may drop the last reference, and could not free tensors during
    interpreter exit.
    """

    field: str
    """Request field that sets it."""

    @property
    def fault(self) -> str | None:
        """Reason why the output cannot continue, such as no allowed token before its end."""

    @property
    def is_over(self) -> bool:
        """Whether no token may follow, as far as known: the output is complete."""

    @property
    def is_slow(self) -> bool:
        """Whether it was late recently, so that drafts should not query it."""

    def ask(self, paths: Collection[tuple[int, ...]]) -> None:
        """Start computing the masks after the output and these paths of draft tokens."""

    def wait(self, until_s: float, *, always: bool) -> None:
        """Wait for requested masks until `until_s` (`time.monotonic`).

        If they were late recently, wait only with `always`.
        """

    def knows(self, path: tuple[int, ...]) -> bool:
        """Return whether the mask after a path is known."""

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        """Return the mask after the output and a path as int32 [W]; None: everything is allowed.

        It is also None after a path that is itself disallowed, which no choice reaches.
        """

    def observe(self, token: int) -> bool:
        """Record an accepted token; return whether later tokens are still restricted."""


class ImmediateLimit:
    """A limit whose masks are always ready."""

    is_over = is_slow = False
    fault: str | None = None

    def ask(self, paths: Collection[tuple[int, ...]]) -> None:
        """Do nothing: there is nothing to compute."""

    def wait(self, until_s: float, *, always: bool) -> None:
        """Do nothing: there is nothing to wait for."""

    def knows(self, path: tuple[int, ...]) -> bool:
        return True


class MinTokens(ImmediateLimit):
    """Forbids end tokens before a minimum length; with `yields`, a grammar may still end the output."""

    field = "min_tokens"

    def __init__(self, ends: Collection[int], count: int, vocab: int, *, yields: bool = False) -> None:
        self.left = count
        self._ends, self._yields = frozenset(ends), yields
        self._bits = all_but(self._ends, vocab)

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        return words_of(self._bits) if len(path) < self.left else None

    def observe(self, token: int) -> bool:
        if token in self._ends and not self._yields:
            self.fault = "before it is reached nothing but an end may follow; lower it, or allow more"
            return True
        self.left -= 1
        return self.left > 0


class AllowedTokens(ImmediateLimit):
    """Allows only the given tokens."""

    field = "allowed_token_ids"

    def __init__(self, tokens: Collection[int], vocab: int) -> None:
        self._tokens = frozenset(tokens)
        self._bits = set_of(self._tokens, vocab)

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        return words_of(self._bits)

    def observe(self, token: int) -> bool:
        if token not in self._tokens:
            self.fault = "the grammar allows none of them here; allow more, or leave one of the two out"
        return True


class BadWords(ImmediateLimit):
    """Forbids the last token of a sequence after the tokens before it."""

    field = "bad_words"

    def __init__(self, sequences: Collection[tuple[int, ...]], vocab: int) -> None:
        self._lasts: dict[tuple[int, ...], frozenset[int]] = {}
        """Forbidden tokens by the tokens before them."""
        for *before, last in sequences:
            self._lasts[*before] = self._lasts.get((*before,), frozenset()) | {last}
        self._lengths: dict[int, list[int]] = {}
        """Lengths of those prefixes by their last token, which limits the look-ups."""
        for length, last in {(len(before), before[-1]) for before in self._lasts if before}:
            self._lengths.setdefault(last, []).append(length)
        self._longest = max(map(len, self._lasts))
        self._said: tuple[int, ...] = ()
        """End of the output, up to the longest such prefix."""
        self._vocab = vocab
        self._always = self._lasts.get((), frozenset())
        self._bits = all_but(self._always, vocab)
        self._here = self._always
        """Tokens forbidden after the output."""

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        forbidden = self._forbidden((*self._said, *path)) if path else self._here
        return words_of(self._bits if forbidden is self._always else all_but(forbidden, self._vocab))

    def observe(self, token: int) -> bool:
        if token in self._here:
            self.fault = (
                "nothing else could follow; forbid less, or leave out what bounds the output beside it"
            )
        output = (*self._said, token)
        self._said = output[max(len(output) - self._longest, 0) :]
        self._here = self._forbidden(self._said)
        return True

    def _forbidden(self, output: tuple[int, ...]) -> frozenset[int]:
        lengths = self._lengths.get(output[-1], ()) if output else ()
        looked_up = (self._lasts.get(output[-length:]) for length in lengths if length <= len(output))
        matches = [lasts for lasts in looked_up if lasts]
        return self._always.union(*matches) if matches else self._always


def bounded_words(limits: Sequence[TokenLimit], path: tuple[int, ...]) -> Tensor | None:
    """Intersect all masks (None: all tokens); a limit that would leave no token is ignored."""
    words_W: Tensor | None = None
    for limit in limits:
        own_W = limit.words(path)
        if own_W is not None:
            both_W = own_W if words_W is None else words_W & own_W
            words_W = both_W if both_W.any() else words_W
    return words_W


def set_of(tokens: Collection[int], vocab: int) -> bytearray:
    """Return a set of tokens as bytes of its 32-bit words."""
    bits = bytearray(4 * -(-vocab // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bits


def all_but(tokens: Collection[int], vocab: int) -> bytearray:
    return set_of(tokens, vocab).translate(INVERTED)


def words_of(bits: bytearray) -> Tensor:
    return torch.frombuffer(bits, dtype=torch.int32)
