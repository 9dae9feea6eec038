"""Text that comes in pieces, and the steps in which it is read.

A reader is a generator: it yields what it has found, and None where it cannot go on without more text.
However the text is cut, it takes the same steps, so that whole answers and streamed ones are read alike.
"""

import json
import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from specdec.text.answers.events import Event
from specdec.text.tokenizer import overlap

R = TypeVar("R")
LONGEST_NAME = 256
"""Characters of a function's name, or of a key. What is longer is none."""
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
    """What was read as a call is none; it is plain text."""


class Source:
    """Text that is not yet settled. `at` is how far it has been looked at; before `take` nothing is gone."""

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self.ended = False
        """Nothing follows the text."""
        self.cut = False
        """It ended because it had to, not because its writer had finished."""
        self.reread = 0
        """Characters that were read as calls and were none, so that they are read once more."""

    def take(self, length: int) -> str:
        """Give up the first characters; what is looked at next is what follows them."""
        taken, self.text, self.at = self.text[:length], self.text[length:], 0
        return taken

    def settle(self) -> None:
        """Give up all that has been looked at."""
        self.take(self.at)

    def seek(self, literals: Sequence[str]) -> tuple[int, str]:
        """Return where the first of the literals stands, and which; or from where one may begin, and ""."""
        found = [(at, literal) for literal in literals if (at := self.text.find(literal, self.at)) >= 0]
        if found:
            return min(found)
        return len(self.text) - max(overlap(self.text[self.at :], literal) for literal in literals), ""

    def sees(self, *literals: str) -> Waiting[str]:
        """Return which of the literals comes next, if any does."""
        while True:
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    return literal
            ahead = self.text[self.at : self.at + max(map(len, literals))]
            if self.ended or not any(literal.startswith(ahead) for literal in literals):
                return ""
            yield None

    def match(self, *literals: str) -> Waiting[str]:
        """Pass the literal that comes next, if any does."""
        literal = yield from self.sees(*literals)
        self.at += len(literal)
        return literal

    def need(self, *literals: str) -> Waiting[str]:
        """Pass one of the literals, without which there is no call."""
        literal = yield from self.match(*literals)
        if not literal:
            raise MalformedCall
        return literal

    def space(self) -> Waiting[None]:
        """Pass white space, up to where something else begins."""
        while True:
            rest = self.text[self.at :]
            self.at = len(self.text) - len(rest.lstrip())
            if self.at < len(self.text) or self.ended:
                return
            yield None

    def name(self) -> Waiting[str]:
        """Pass a name and the `>` that ends it."""
        found = yield from self._pattern(NAME, NAME_SO_FAR)
        return found[1]

    def word(self) -> Waiting[str]:
        """Pass a name that ends where a sign stands that is of no name."""
        found = yield from self._pattern(WORD, WORD_SO_FAR)
        return found[0]

    def string(self) -> Waiting[str]:
        """Pass a short string of JSON, and return what it stands for."""
        found = yield from self._pattern(STRING, STRING_SO_FAR)
        try:
            return str(json.loads(found[0], strict=False))
        except ValueError:
            raise MalformedCall from None

    def _pattern(self, whole: re.Pattern[str], so_far: re.Pattern[str]) -> Waiting[re.Match[str]]:
        while not (found := whole.match(self.text, self.at)):
            if self.ended or not so_far.match(self.text, self.at):
                raise MalformedCall
            yield None
        self.at = found.end()
        return found

    def chunk(self, ends: Sequence[str]) -> Waiting[tuple[str, str | None]]:
        """Pass some text before the first of the ends, and the end if it is there; return both.

        Instead of the end it is None where the text goes on, and "" where nothing comes after it. What may be
        the beginning of an end is given up where the text was cut off there.
        """
        while True:
            start = self.at
            where, end = self.seek(ends)
            if self.ended and not end:
                self.text = self.text[:where] if self.cut else self.text
                where = len(self.text)
            self.at = where + len(end)
            if where > start or end or self.ended:
                return self.text[start:where], end if end or self.ended else None
            yield None

    def value(self, closing: str) -> Pieces:
        """Yield the text of an object or a string of JSON as it comes, to its end.

        It is not checked. One that is broken ends at a closing tag outside its strings, or with the text.
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
