"""A full-screen terminal: redrawn in place, keys read one by one, restored at the end."""

import contextlib
import os
import sys
import termios
import tty
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Alternate screen, no cursor, no line wrapping."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST = "\x1b[H", "\x1b[K", "\x1b[J"
USUAL = (80, 24)


class Screen:
    """Own the terminal between `enter` and `leave`, which may be called repeatedly."""

    def __init__(self) -> None:
        self.keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        """File descriptor of the keyboard; None without a terminal."""
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def enter(self) -> None:
        if self.keys is not None:
            self._before = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys)
        self._write(ENTER)

    def leave(self) -> None:
        # A closed terminal needs no restoring.
        with contextlib.suppress(OSError):
            self._write(LEAVE)
        if self.keys is not None and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._before)

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the screen's lines; lines below the bottom are dropped."""
        *above, last = lines[: size()[1]]
        self._write(HOME + "".join(f"{REST_OF_LINE}{line}\n" for line in above) + REST + last)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def size() -> tuple[int, int]:
    """Return the terminal's current columns and lines."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    # A hidden terminal may report a size of 0.
    return columns or USUAL[0], lines or USUAL[1]
