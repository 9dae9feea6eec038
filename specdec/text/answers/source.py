"""Incremental parsing of text that arrives in pieces.

A parser is a generator: it yields results, and None when it needs more text. Its steps do not depend on how
the text is split, so streamed and complete answers parse alike.
"""

import json
import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from specdec.text.answers.events import Event
from specdec.text.tokenizer import overlap

R = TypeVar("R")
LONGEST_NAME = 256
"""Maximum characters of a function name or key; longer ones are malformed."""
NAME = re.compile(rf"([^<>\s]{{1,{LONGEST_NAME}}})>")
NAME_SO_FAR = re.compile(rf"[^<>\s]{{0,{LONGEST_NAME}}}\Z")
WORD = re.compile(rf"[\w.:/-]{{1,{LONGEST_NAME}}}(?=[^\w.:/-])")
WORD_SO_FAR = re.compile(rf"[\w.:/-]{{0,{LONGEST_NAME}}}\Z")
STRING = re.compile(rf'"(?:[^"\\]|\\.){{0,{LONGEST_NAME}}}"', re.DOTALL)
STRING_SO_FAR = re.compile(rf'(?:"(?:[^"\\]|\\.){{0,{LONGEST_NAME}}}\\?)?\Z', re.DOTALL)


Reading = Generator[Event | None, None, R]
Pieces = Generator[str | None, None, None]
Waiting = Generator[None, None, R]


class MalformedCall(Exception):
    """The text being parsed as a call is plain text."""


class TextCursor:
    """Pending text with a cursor, `at`. Only `take` removes text."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = False
        """No more text follows."""
        self.cut = False
        """The output was truncated, rather than finished by the model."""
        self.reread = 0
        """Characters parsed as calls that were malformed, so that they are parsed again."""

    def take(self, length: int) -> str:
        """Remove and return the first characters; reset the cursor to the rest."""
        taken, self.text, self.at = self.text[:length], self.text[length:], 0
        return taken

    def settle(self) -> None:
        """Remove everything before the cursor."""
        self.take(self.at)

    def seek(self, literals: Sequence[str]) -> tuple[int, str]:
        """Return the first literal found and its position; else where one may begin, and ""."""
        matches = [(at, literal) for literal in literals if (at := self.text.find(literal, self.at)) >= 0]
        if matches:
            return min(matches)
        return len(self.text) - max(overlap(self.text[self.at :], literal) for literal in literals), ""

    def sees(self, *literals: str) -> Waiting[str]:
        """Return which of the literals comes next, or ""."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    return literal
            ahead = self.text[self.at : self.at + max(map(len, literals))]
            if self.ended or not any(literal.startswith(ahead) for literal in literals):
                return ""
            yield None

    def match(self, *literals: str) -> Waiting[str]:
        """Consume the literal that comes next, if any."""
        literal = yield from self.sees(*literals)
        self.at += len(literal)
        return literal

    def need(self, *literals: str) -> Waiting[str]:
        """Consume one of the literals, or raise MalformedCall."""
        literal = yield from self.match(*literals)
        if not literal:
            raise MalformedCall
        return literal

    def space(self) -> Waiting[None]:
        """Skip white space up to the next other character."""
        while True:
            rest = self.text[self.at :]
            self.at = len(self.text) - len(rest.lstrip())
            if self.at < len(self.text) or self.ended:
                return
            yield None

    def name(self) -> Waiting[str]:
        """Consume a name and its closing `>`."""
        match = yield from self._pattern(NAME, NAME_SO_FAR)
        return match[1]

    def word(self) -> Waiting[str]:
        """Consume a name that ends before the first character that cannot be part of one."""
        match = yield from self._pattern(WORD, WORD_SO_FAR)
        return match[0]

    def string(self) -> Waiting[str]:
        """Consume a short JSON string, and return its value."""
        match = yield from self._pattern(STRING, STRING_SO_FAR)
        try:
            return str(json.loads(match[0], strict=False))
        except ValueError:
            raise MalformedCall from None

    def _pattern(self, pattern: re.Pattern[str], so_far: re.Pattern[str]) -> Waiting[re.Match[str]]:
        while not (match := pattern.match(self.text, self.at)):
            if self.ended or not so_far.match(self.text, self.at):
                raise MalformedCall
            yield None
        self.at = match.end()
        return match

    def chunk(self, ends: Sequence[str]) -> Waiting[tuple[str, str | None]]:
        """Consume text before the first of the ends, and the end if present; return both.

        The end is None while the text goes on, and "" if the text ended without one. A partial end is dropped
        if the output was truncated there.
        """
        while True:
            start = self.at
            position, end = self.seek(ends)
            if self.ended and not end:
                self.text = self.text[:position] if self.cut else self.text
                position = len(self.text)
            self.at = position + len(end)
            if position > start or end or self.ended:
                return self.text[start:position], end if end or self.ended else None
            yield None

    def value(self, closing: str) -> Pieces:
        """Yield the text of a JSON object or string up to its end, as it arrives.

        The JSON is not validated. A broken value ends at a closing tag outside its strings, or with the text.
        """
        depth, quoted, escaped = 0, False, False
        while True:
            start, tag = self.at, False
            while self.at < len(self.text) and not tag:
                sign = self.text[self.at]
                if escaped:
                    escaped = False
                elif quoted:
                    escaped, quoted = sign == "\\", sign != '"'
                else:
                    depth += (sign in "{[") - (sign in "}]")
                    quoted, tag = sign == '"', sign == "<"
                self.at += not tag
                if depth <= 0 and not quoted and not tag:
                    yield self.text[start : self.at]
                    return
            if self.at > start:
                yield self.text[start : self.at]
            if tag:
                if (yield from self.sees(closing)):
                    return
                self.at += 1
                yield "<"
            elif self.ended:
                return
            else:
                yield None
