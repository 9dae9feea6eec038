"""What of the vocabulary a node may choose from: sets of tokens as words of 32 bits."""

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

INVERTED = bytes(reversed(range(256)))
"""What becomes of each byte where all its bits change."""


class Limit(Protocol):
    """Limit one request's choices. It observes every token that the request accepts.

    What may follow may take a while to find out: it is asked for, waited for a little, and then known or not.
    It keeps bits, not tensors: a caller's thread, which may be the last to hold it, could not give these back
    while the interpreter ends.
    """

    field: str
    """Of a request, which asks for it."""

    @property
    def fault(self) -> str | None:
        """Return why the output cannot go on: nothing may follow and it is no end, for instance."""

    @property
    def is_over(self) -> bool:
        """Return whether no token may follow, as far as that is known: the output has reached its end."""

    @property
    def is_slow(self) -> bool:
        """Return whether it was late recently, so that drafts had better not ask it more."""

    def ask(self, paths: Collection[tuple[int, ...]]) -> None:
        """Start computing what may follow the output and paths of drafted tokens."""

    def wait(self, until_s: float, *, always: bool) -> None:
        """Wait for what was asked until then (`time.monotonic`): `always`, or unless it was late of late."""

    def knows(self, path: tuple[int, ...]) -> bool:
        """Return whether it is known what may follow a path."""

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        """Return what may follow the output and a path of drafted tokens, as int32 [W]; None: everything.

        Everything, too, where the path itself goes where none may: no choice will ever reach it.
        """

    def observe(self, token: int) -> bool:
        """Take a token that was accepted; tell whether later ones are still bounded."""


class Ready:
    """A limit that knows at once what may follow."""

    is_over = is_slow = False
    fault: str | None = None

    def ask(self, paths: Collection[tuple[int, ...]]) -> None:
        """Do nothing: there is nothing to compute."""

    def wait(self, until_s: float, *, always: bool) -> None:
        """Do nothing: there is nothing to wait for."""

    def knows(self, path: tuple[int, ...]) -> bool:
        return True


class NotYet(Ready):
    """Forbids the tokens that end an output until it has some length; a form may end it yet."""

    field = "min_tokens"

    def __init__(self, ends: Collection[int], least: int, vocab: int, *, yields: bool = False) -> None:
        self.left = least
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


class Allowed(Ready):
    """Allows some tokens alone."""

    field = "allowed_token_ids"

    def __init__(self, tokens: Collection[int], vocab: int) -> None:
        self._tokens = frozenset(tokens)
        self._bits = set_of(self._tokens, vocab)

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        return words_of(self._bits)

    def observe(self, token: int) -> bool:
        if token not in self._tokens:
            self.fault = "the output's form allows none of them here; allow more, or leave one of the two out"
        return True


class Banned(Ready):
    """Forbids the last token of a sequence wherever the output and the path end with the tokens before it."""

    field = "bad_words"

    def __init__(self, sequences: Collection[tuple[int, ...]], vocab: int) -> None:
        self._lasts: dict[tuple[int, ...], frozenset[int]] = {}
        """What may not follow, by what stands before it."""
        for *before, last in sequences:
            self._lasts[*before] = self._lasts.get((*before,), frozenset()) | {last}
        self._lengths: dict[int, list[int]] = {}
        """How long that may be, by its last token: the only lengths of the output's end to look up."""
        for length, last in {(len(before), before[-1]) for before in self._lasts if before}:
            self._lengths.setdefault(last, []).append(length)
        self._longest = max(map(len, self._lasts))
        self._said: tuple[int, ...] = ()
        """The end of the output, as much of it as can stand before a forbidden token."""
        self._vocab = vocab
        self._always = self._lasts.get((), frozenset())
        self._bits = all_but(self._always, vocab)
        self._here = self._always
        """What may not follow the output."""

    def words(self, path: tuple[int, ...]) -> Tensor | None:
        here = self._forbidden((*self._said, *path)) if path else self._here
        return words_of(self._bits if here is self._always else all_but(here, self._vocab))

    def observe(self, token: int) -> bool:
        if token in self._here:
            self.fault = (
                "nothing else could follow; forbid less, or leave out what bounds the output beside it"
            )
        said = (*self._said, token)
        self._said = said[max(len(said) - self._longest, 0) :]
        self._here = self._forbidden(self._said)
        return True

    def _forbidden(self, said: tuple[int, ...]) -> frozenset[int]:
        lengths = self._lengths.get(said[-1], ()) if said else ()
        looked_up = (self._lasts.get(said[-length:]) for length in lengths if length <= len(said))
        found = [lasts for lasts in looked_up if lasts]
        return self._always.union(*found) if found else self._always


def bounded_words(limits: Sequence[Limit], path: tuple[int, ...]) -> Tensor | None:
    """Return what all limits allow, None: everything. One that would leave nothing yields to those before."""
    words_W: Tensor | None = None
    for limit in limits:
        own_W = limit.words(path)
        if own_W is not None:
            both_W = own_W if words_W is None else words_W & own_W
            words_W = both_W if both_W.any() else words_W
    return words_W


def set_of(tokens: Collection[int], vocab: int) -> bytearray:
    """Return the words in which some tokens stand, as bytes."""
    bits = bytearray(4 * -(-vocab // 32))
    for token in tokens:
        bits[token // 8] |= 1 << token % 8
    return bits


def all_but(tokens: Collection[int], vocab: int) -> bytearray:
    return set_of(tokens, vocab).translate(INVERTED)


def words_of(bits: bytearray) -> Tensor:
    return torch.frombuffer(bits, dtype=torch.int32)
