"""Text to tokens and back: a folder's tokenizer, and the stream that turns one output's tokens into text."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from specdec.errors import CheckpointError

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoding shows for bytes that are no character, or not yet."""
WINDOW, KEPT = 24, 8
"""Tokens that are decoded at once at most, and how many of them stay as context when they are too many."""


class Tokenizer:
    """Read and write text as the model's own tokenizer does."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the special ones that the tokenizer puts around it."""
        ids: list[int] = self._inner.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; special tokens have none."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Read `tokenizer.json`; a folder without one serves token ids only."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} is not a tokenizer ({error}); download it again, or remove it to pass token ids only",
            field="tokenizer.json",
        ) from error


class TextStream:
    """Turn one output's tokens into text as they come.

    Held back are the bytes of an unfinished character and whatever may become a stop string; the stop string
    that is completed first ends the text before it. Each token costs the decoding of a bounded window.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        self._ids: list[int] = []
        self._decoded = 0
        """Characters of the window's text that have left it."""
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token and return the text that is now certain."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # A character in the making is at most one replacement character at the end.
        certain = len(text) - text.endswith(INCOMPLETE)
        new = text[self._decoded : certain]
        self._decoded = max(self._decoded, certain)
        if len(self._ids) > WINDOW:
            self._slide(len(text) - self._decoded)
        return self._release(new, last=False)

    def finish(self) -> str:
        """Return what was held back; nothing comes after it."""
        return self._release(self._tokenizer.decode(self._ids)[self._decoded :], last=True)

    def _slide(self, pending: int) -> None:
        """Forget old tokens: what follows depends on the last few only."""
        self._ids = self._ids[-KEPT:]
        self._decoded = len(self._tokenizer.decode(self._ids)) - pending

    def _release(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text, self._held = self._held + new, ""
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
