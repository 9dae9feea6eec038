"""The history of typed lines, in a file."""

import contextlib
import json
import os
from pathlib import Path
from typing import TextIO

MOST_ENTRIES = 1000
"""Maximum entries of the file, and characters of each; longer entries last for their session only."""
LONGEST_ENTRY = 8192


class ChatHistory:
    """A history file with a JSON string per line, readable only by its owner."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """Return the entries; truncate a file that has grown too long."""
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        recent = lines[-MOST_ENTRIES:]
        if len(lines) > len(recent):
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            with self._open(temporary, os.O_TRUNC) as file:
                file.writelines(f"{line}\n" for line in recent)
            temporary.replace(self.path)
        return [entry for line in recent if (entry := _entry(line))]

    def add(self, text: str) -> None:
        """Append an entry; other chats may append concurrently."""
        if len(text) <= LONGEST_ENTRY:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open(self.path, os.O_APPEND) as file:
                file.write(f"{json.dumps(text)}\n")

    def _open(self, path: Path, flag: int) -> TextIO:
        """Open for writing, and make the file private to its owner."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
        os.fchmod(fd, 0o600)
        return open(fd, "w", encoding="utf-8")


def _entry(line: str) -> str:
    """Return an entry; empty for a line that was cut off."""
    with contextlib.suppress(ValueError):
        if isinstance(text := json.loads(line), str):
            return text
    return ""


def history_path() -> Path:
    """Return the history file's path, following the XDG base directories."""
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = configured if configured.is_absolute() else Path.home() / ".local" / "state"
    return state / "specdec" / "chat_history"
