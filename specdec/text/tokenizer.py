"""A folder's tokenizer, and the incremental detokenizer with stop strings."""

import copy
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import tokenizers

from specdec.config.folders import anew, has_file
from specdec.errors import CheckpointError
from specdec.text.stops import StopNode

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""The replacement character: bytes that are not, or not yet, a character."""
LONGEST = 4
"""Bytes of a UTF-8 character, and so the most tokens that one may need."""
CONTEXT = 8
"""Tokens kept as context when detokenizing; at most five times as many are decoded at once."""
_SHOWN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN]
BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""How byte-level vocabularies such as GPT-2's spell each byte."""
SPOKEN = {
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>"),
    *("<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "｜DSML｜"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
}
"""Special tokens that are detokenized nevertheless: they mark tool calls and thinking."""


class Tokenizer:
    """Encode and decode text as the model's own tokenizer does."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Files retain training's truncation and padding, which must not apply to prompts.
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        added = inner.get_added_tokens_decoder().items()
        self.longest = max(map(len, inner.get_vocab()), default=1)
        """Upper bound on a token's length in characters: its vocabulary entry is at least as long."""
        self._spelt: dict[int, str] = {}
        self._special = {i for i, token in added if token.special and token.content not in SPOKEN}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special ones that the tokenizer adds around it.

        A chat rendered by a template contains its own: encode it with `special=False`.
        """
        # Encoding a batch releases the GIL; encoding a single text does not.
        ids: list[int] = self.inner.encode_batch([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, skipping special ones."""
        spoken = [token for token in ids if token not in self._special]
        text: str = self.inner.decode(spoken, skip_special_tokens=False)
        return text

    def spell(self, token: int) -> str:
        """Return one token's text, including special tokens."""
        text = self._spelt.get(token)
        if text is None:
            text = self._spelt[token] = self.inner.decode([token], skip_special_tokens=False)
        return text

    def spell_all(self, vocab: int) -> Iterator[str]:
        """Yield the texts of a vocabulary's tokens by id, uncached."""
        return (self.inner.decode([token], skip_special_tokens=False) for token in range(vocab))

    def bytes_of(self, token: int) -> bytes:
        """Return one token's bytes, which may be part of a character."""
        text = self.spell(token)
        piece = self.inner.id_to_token(token) if INCOMPLETE in text else None
        if piece and (found := re.fullmatch(r"<0x([0-9A-F]{2})>", piece)):
            return bytes.fromhex(found[1])
        if piece and all(sign in BYTES for sign in piece):
            return bytes(BYTES[sign] for sign in piece)
        return text.encode()

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """Return the tokenizations of a word at the start of a text and after a space.

        One leading space is ignored. A word with other leading white space is encoded unchanged.
        """
        bare = word.removeprefix(" ")
        texts = (word,) if not bare or bare[0].isspace() else (bare, f" {bare}")
        return {ids for text in texts if (ids := tuple(self.encode(text, special=False)))}

    def with_special_tokens(self) -> Self:
        """Return a tokenizer that detokenizes special tokens too."""
        other = copy.copy(self)
        other._special = set()
        return other

    def is_silent(self, token: int) -> bool:
        """Return whether a token has no text: a special token, or an id without a vocabulary entry."""
        return token in self._special or self.inner.id_to_token(token) is None


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load `tokenizer.json`; a folder without one serves token ids only."""
    path = folder / "tokenizer.json"
    if not has_file(path):
        return None
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{path} is not a tokenizer ({error}); "
            + anew(folder, "download it again, or remove it to pass token ids only"),
            field="tokenizer.json",
        ) from error


class TextStream:
    """Detokenize one output incrementally.

    Bytes of an unfinished character and possible starts of a stop string are held back. The first completed
    stop string ends the text before it, or after it with `keeps_stop`; one completed while stops are not
    allowed is text. Each token costs the decoding of a bounded window.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: StopNode | None = None, *, keeps_stop: bool = False
    ) -> None:
        self._tokenizer, self._keeps_stop = tokenizer, keeps_stop
        self._node = None if stops is None or stops.is_final else stops
        """The stop-string state at the end of the text; None without stop strings."""
        self._ids: list[int] = []
        self._decoded = 0
        """Characters of the window's text emitted so far."""
        self._mark = 0
        """Window length at which the text last ended with a whole character; tokens before it may be
        dropped."""
        self._unfinished = 0
        """Tokens since the text last ended with a whole character."""
        self._held = ""
        self.length = 0
        """Characters of the text so far, including those held back for a stop string."""
        self.stopped = False
        self.stop: str | None = None
        """The stop string that ended the output."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Append a token and return the text that can be emitted; stop strings apply if `may_stop`."""
        if self.stopped or self._tokenizer.is_silent(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        broken = len(text) - len(text.rstrip(INCOMPLETE))
        self._unfinished = self._unfinished + 1 if broken else 0
        # After LONGEST tokens the bytes cannot form a character; only the last may still begin one.
        certain = len(text) - (broken if self._unfinished <= LONGEST else min(broken, 1))
        new = text[self._decoded : certain]
        self._decoded = max(self._decoded, certain)
        self._slide(len(text) - self._decoded)
        self.length += len(new)
        return self._release(new, may_stop=may_stop)

    def finish(self) -> str:
        """Return the held-back text at the end of the output."""
        new = self._tokenizer.decode(self._ids)[self._decoded :]
        self._ids, self._decoded = [], 0
        return self._release(new, last=True)

    def _slide(self, pending: int) -> None:
        """Drop old tokens and recompute the emitted length: only the head of the window's text changes."""
        if not self._unfinished and len(self._ids) - self._mark >= CONTEXT:
            forgotten, self._mark = self._mark, len(self._ids) - self._mark
        elif len(self._ids) - self._mark > 2 * CONTEXT:
            forgotten, self._mark = len(self._ids) - CONTEXT, 0
        else:
            return
        self._ids = self._ids[forgotten:]
        self._decoded = len(self._tokenizer.decode(self._ids)) - pending

    def _release(self, new: str, *, may_stop: bool = True, last: bool = False) -> str:
        if self.stopped:
            return ""
        if self._node is None:
            return new
        text, end = self._held + new, len(self._held)
        for sign in new:  # the first to complete, independent of how tokens split the text
            self._node, end = self._node.after(sign), end + 1
            if may_stop and self._node.stop:
                self.stopped, self.stop, self._held = True, self._node.stop, ""
                return text[: end if self._keeps_stop else end - len(self.stop)]
        end -= 0 if last else self._node.held
        self._held = text[end:]
        return text[:end]


class TextPiece(NamedTuple):
    """A piece of text that one token produced or completed."""

    text: str
    origin: int
    """The token's origin: 0 is the target's own choice, n >= 1 a draft token at depth n."""


class TokenTextCutter:
    """Cut a text, which may lag behind its tokens, into pieces per token."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, int]] = deque()
        """End positions and origins of tokens whose text has not been fully cut."""
        self._noted = self._cut = 0
        self._last = 0
        """The origin of the last token, used for text beyond all noted tokens."""

    def note(self, length: int, origin: int) -> None:
        """Record a token's origin and the length of the text including it."""
        self._last = origin
        if length > self._noted:
            self._ends.append((length, origin))
            self._noted = length

    def cut(self, text: str) -> tuple[TextPiece, ...]:
        """Return the next part of the text in pieces."""
        pieces = []
        while text:
            end, origin = self._ends[0] if self._ends else (self._cut + len(text), self._last)
            piece, text = text[: end - self._cut], text[end - self._cut :]
            self._cut += len(piece)
            pieces.append(TextPiece(piece, origin))
            if self._ends and self._cut == end:
                self._ends.popleft()
        return tuple(pieces)


def overlap(text: str, stop: str) -> int:
    """Return the length of the text's longest suffix that may begin the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
