"""Text for a terminal: colours, escaped control characters, sizes. Imports no engine."""

import os
import re
import sys

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, but for tab and newline; those that turn the direction of what follows are some too."""

ACCEPTED, PLAIN = "\x1b[32m", "\x1b[0m"
"""The colour of accepted draft tokens, and the reset."""


def paints(colour: str) -> bool:
    """Return whether to write in colour: `auto` does on a terminal, unless NO_COLOR is set to something."""
    if colour != "auto":
        return colour == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def visible(text: str) -> str:
    """Return text as a terminal may show it: escape its control characters, unless it goes elsewhere."""
    return escaped(text) if sys.stdout.isatty() else text


def escaped(text: str) -> str:
    """Escape control characters: a terminal obeys them."""
    return CONTROLS.sub(_as_code, text)


def _as_code(found: re.Match[str]) -> str:
    point = ord(found[0])
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{point:04x}"


def binary(num_bytes: float) -> str:
    """Write a number of bytes in the largest unit that it reaches."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while num_bytes >= 1024 and unit != "TiB":
        num_bytes, unit = num_bytes / 1024, next(units)
    return f"{num_bytes:.1f} {unit}"
