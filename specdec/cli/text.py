"""Text for a terminal: colours, escaped control characters, sizes. Imports no engine."""

import os
import re
import sys

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, including those that change the text direction."""

ACCEPTED, PLAIN = "\x1b[32m", "\x1b[0m"
"""The colour of accepted draft tokens, and the reset."""


def paints(colour: str) -> bool:
    """Return whether to use colour: `auto` does on a terminal, unless NO_COLOR is set."""
    if colour != "auto":
        return colour == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def visible(text: str) -> str:
    """Escape control characters if stdout is a terminal."""
    return escaped(text) if sys.stdout.isatty() else text


def escaped(text: str) -> str:
    """Escape control characters, which a terminal would obey."""
    return CONTROLS.sub(_as_code, text)


def _as_code(match: re.Match[str]) -> str:
    point = ord(match[0])
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}"


def binary(num_bytes: float) -> str:
    """Format a number of bytes in the largest unit that it reaches."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while num_bytes >= 1024 and unit != "TiB":
        num_bytes, unit = num_bytes / 1024, next(units)
    return f"{num_bytes:.1f} {unit}"
