"""What a chat shows: the answer on stdout as it comes; figures, notices and errors on stderr."""

import os
import sys

from specdec.cli.terminal import PLAIN, escaped, painted
from specdec.core.outputs import Delta, RequestStats

DIM, ALARM = "\x1b[2m", "\x1b[31m"
BETWEEN = " · "


class View:
    """Write for a person; control characters of a model, a file or a name never reach the terminal."""

    def __init__(self, *, coloured: bool) -> None:
        self.coloured = coloured
        self._is_line_open = False

    def show(self, delta: Delta, *, drafts: bool) -> None:
        """Show what a step added."""
        if delta.text:
            self._is_line_open = not delta.text.endswith("\n")
            print(painted(delta.pieces, coloured=self.coloured and drafts), end="", flush=True)

    def end_answer(self) -> None:
        """Begin a new line unless the text has."""
        if self._is_line_open:
            print(flush=True)
        self._is_line_open = False

    def say(self, text: str) -> None:
        """Say what was asked for."""
        self._say(text, "")

    def notice(self, text: str) -> None:
        """Say what is no answer."""
        self._say(text, DIM)

    def error(self, text: str) -> None:
        """Say what is wrong."""
        self._say(text, ALARM)

    def figures(self, stats: RequestStats) -> None:
        """Show an answer's figures on one line."""
        self._say(figures(stats, _columns()), DIM)

    def _say(self, text: str, style: str) -> None:
        shown = escaped(text)
        print(f"{style}{shown}{PLAIN}" if self.coloured and style else shown, file=sys.stderr, flush=True)


def figures(stats: RequestStats, columns: int | None) -> str:
    """Describe an answer: as much as fits into a line, what matters most first."""
    decode_s = stats.total_s - stats.first_token_s
    parts = [f"{stats.output_tokens:,} tokens"]
    if stats.output_tokens > 1 and decode_s > 0:
        parts.append(f"{(stats.output_tokens - 1) / decode_s:,.1f} tok/s")
    if stats.first_token_s:
        parts.append(f"first after {stats.first_token_s * 1e3:,.0f} ms")
    if stats.drafted:
        parts.append(f"{stats.acceptance_length:.2f} tokens a step")
    parts.append(f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} cached")
    line = parts[0]
    for part in parts[1:]:
        longer = f"{line}{BETWEEN}{part}"
        if columns is not None and len(longer) >= columns:
            break
        line = longer
    return line


def _columns() -> int | None:
    """Return the terminal's width; None where figures go elsewhere."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):
        return None
