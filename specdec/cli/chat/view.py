"""The chat display: answers are streamed to stdout; thinking, figures, notices and errors go to stderr."""

import os
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby

from specdec.cli.chat.session import AnswerPart
from specdec.cli.text import ACCEPTED, PLAIN, escaped, visible
from specdec.core.outputs import RequestStats

DIM, ALARM = "\x1b[2m", "\x1b[31m"
BETWEEN = " · "
NARROWEST = 24
"""Minimum columns of text beside a table's names; with fewer it goes below them."""


class ChatView:
    """Write to the terminal, escaping control characters of models, files and names."""

    def __init__(self, *, coloured: bool) -> None:
        self.coloured = coloured
        self._is_line_open = self._is_thinking = False

    def show(self, parts: Sequence[AnswerPart], *, drafts: bool) -> None:
        """Show the parts that a step added to an answer."""
        for (is_thinking, is_drafted), group in groupby(parts, key=lambda item: item[1:]):
            text = "".join(part.text for part in group)
            if is_thinking != self._is_thinking:
                self._turn(is_thinking)
            style = ACCEPTED if drafts and is_drafted else DIM if is_thinking else ""
            if is_thinking:
                print(self._styled(escaped(text), style), end="", file=sys.stderr, flush=True)
            else:
                print(self._styled(visible(text), style), end="", flush=True)
            self._is_line_open = not text.endswith("\n")

    def end_answer(self) -> None:
        """End the line of an unfinished answer."""
        if self._is_line_open:
            print(file=sys.stderr if self._is_thinking else sys.stdout, flush=True)
        self._is_line_open = self._is_thinking = False

    def say(self, text: str) -> None:
        """Print requested information."""
        self._say(text, "")

    def notice(self, text: str) -> None:
        """Print a notice."""
        self._say(text, DIM)

    def error(self, text: str) -> None:
        """Print an error."""
        self._say(text, ALARM)

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and descriptions, side by side if they fit."""
        width = max((len(name) + 2 for name, _ in rows), default=0)
        columns = _columns()
        is_narrow = columns is not None and columns - width < NARROWEST
        for name, description in rows:
            text = f"{name}\n  {description}" if is_narrow else f"{name.ljust(width)}{description}"
            self._say(text, "", indent="  " if is_narrow else " " * width)

    def figures(self, stats: RequestStats) -> None:
        """Print an answer's figures on one line."""
        self._say(figures(stats, _columns()), DIM)

    def _turn(self, is_thinking: bool) -> None:
        """Switch between thinking and the answer; without colours, print a label."""
        if self._is_line_open:
            print(file=sys.stderr, flush=True)
        if not self.coloured:
            self._say("[thinking]" if is_thinking else "[answer]", "")
        elif not is_thinking:
            print(file=sys.stderr, flush=True)
        self._is_thinking, self._is_line_open = is_thinking, False

    def _say(self, text: str, style: str, *, indent: str = "") -> None:
        lines = wrapped(escaped(text), _columns(), indent)
        print(self._styled(lines, style), file=sys.stderr, flush=True)

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{PLAIN}" if self.coloured and style and text else text


def wrapped(text: str, columns: int | None, indent: str = "") -> str:
    """Break lines at spaces if they are wider than the terminal."""
    if columns is None:
        return text
    wrapper = textwrap.TextWrapper(
        width=max(columns - 1, len(indent) + 1),
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
    return "\n".join(wrapper.fill(line) if len(line) >= columns else line for line in text.split("\n"))


def figures(stats: RequestStats, columns: int | None) -> str:
    """Describe an answer: as much as fits on a line, the most important first."""
    decode_s = stats.total_s - stats.first_token_s
    parts = [f"{stats.output_tokens:,} tokens"]
    if stats.output_tokens > 1 and decode_s > 0:
        rate = (stats.output_tokens - 1) / decode_s
        parts.append(f"{rate:,.0f} tok/s" if rate >= 100 else f"{rate:.1f} tok/s")
    if stats.first_token_s:
        parts.append(f"first {stats.first_token_s * 1e3:,.0f} ms")
    if stats.drafted:
        parts.append(f"{stats.acceptance_length:.2f} tok/step")
    parts.append(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} cached")
    line = parts[0]
    for part in parts[1:]:
        longer = f"{line}{BETWEEN}{part}"
        if columns is not None and len(longer) >= columns:
            break
        line = longer
    return line


def _columns() -> int | None:
    """Return the terminal's width; None if stderr is not a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):
        return None
