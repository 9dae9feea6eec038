"""What a person types: messages of one line or several, edited by readline, with a history in a file."""

import contextlib
import json
import os
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from specdec.cli.chat.view import View

try:
    import readline
except ImportError:  # a Python that was built without it: lines are read as they come
    readline = None  # type: ignore[assignment]

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
QUOTED = re.compile(rf"(/\w+\s+)?{QUOTES}")
"""A message, or a command's argument, that goes on to the next quotes."""
MOST_ENTRIES = 1000
"""In the file, each at most so long; longer ones are recalled in their own session alone."""
LONGEST_ENTRY = 8192
LEAVE = "Ctrl-D or /bye ends the chat."


class History:
    """A file of what was typed, a JSON string a line, for its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """Return the entries; a file that has grown too long is cut."""
        try:
            lines = self.path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        kept = lines[-MOST_ENTRIES:]
        if len(lines) > len(kept):
            other = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            with self._open(other, os.O_TRUNC) as file:
                file.writelines(f"{line}\n" for line in kept)
            other.replace(self.path)
        return [entry for line in kept if (entry := _entry(line))]

    def add(self, text: str) -> None:
        """Append an entry: other chats may be appending too."""
        if len(text) <= LONGEST_ENTRY:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._open(self.path, os.O_APPEND) as file:
                file.write(f"{json.dumps(text)}\n")

    def _open(self, path: Path, flag: int) -> TextIO:
        """Open for writing, for the owner alone: also a file that was readable before."""
        number = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
        os.fchmod(number, 0o600)
        return open(number, "w", encoding="utf-8")


def _entry(line: str) -> str:
    """Return an entry; a line that was cut off is none."""
    with contextlib.suppress(ValueError):
        if isinstance(text := json.loads(line), str):
            return text
    return ""


def history_path() -> Path:
    """Return where the history lies, by the XDG base directories."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = given if given.is_absolute() else Path.home() / ".local" / "state"
    return state / "specdec" / "chat_history"


def read_message(read: Callable[[str], str]) -> str:
    """Read lines, each asked for by a prompt, until they are a message.

    One that begins with three quotes ends with them, and a backslash at a line's end goes on in the next.
    """
    text = read(PROMPT)
    if found := QUOTED.match(text):
        text = text[found.end() :]
        while not text.rstrip().endswith(QUOTES):
            text += f"\n{read(MORE)}"
        inner = text.rstrip().removesuffix(QUOTES).removeprefix("\n").removesuffix("\n")
        return (found[1] or "") + inner
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{read(MORE)}"
    return text


class Keyboard:
    """Reads messages from a terminal, with readline where Python has it."""

    def __init__(self, view: View, words: Sequence[str], history: History) -> None:
        """Complete these words, and recall the history."""
        self._view, self._words = view, words
        self._history: History | None = history
        self._given = ""
        self._is_empty = True
        """Whether nothing was typed when Ctrl-C came."""
        if readline is None:
            return
        is_editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
        if not is_editline:  # pasted lines are then one message
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)
        readline.set_completer_delims(" \n")
        readline.set_completer(self._complete)
        with self._keeping_history():
            for entry in history.read():
                readline.add_history(entry)

    def read(self, given: str = "") -> str:
        """Return the next message; `given` stands at the prompt, to be edited. EOFError: it is to end."""
        self._given = given
        while True:
            try:
                with self._noting_interrupts():
                    text = read_message(self._line)
            except KeyboardInterrupt:
                print(file=sys.stderr)
                if self._is_empty:
                    self._view.notice(LEAVE)
                continue
            except UnicodeDecodeError:
                self._view.error("This is no UTF-8: set the terminal to it.")
                continue
            if text.strip():
                self._recall(text)
                return text

    def _line(self, prompt: str) -> str:
        given, self._given = self._given, ""
        if readline is None or not sys.stdout.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        readline.set_startup_hook((lambda: readline.insert_text(given)) if given else None)
        self._is_empty = prompt == PROMPT
        return input(prompt)

    @contextlib.contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Note whether a line is empty when Ctrl-C comes: once `input` has raised, its text is gone."""

        def pressed(number: int, frame: FrameType | None) -> None:
            self._is_empty = self._is_empty and not (readline and readline.get_line_buffer())
            raise KeyboardInterrupt

        with handling_interrupts(pressed):
            yield

    def _recall(self, text: str) -> None:
        if readline is not None:
            readline.add_history(text)
        with self._keeping_history():
            if self._history:
                self._history.add(text)

    @contextlib.contextmanager
    def _keeping_history(self) -> Iterator[None]:
        """Say once why no history is kept, where none can be."""
        try:
            yield
        except OSError as error:
            self._history = None
            self._view.notice(f"What is typed is not kept: {error}")

    def _complete(self, text: str, index: int) -> str | None:
        """Complete a command's name."""
        assert readline is not None
        found = [word for word in self._words if word.startswith(text)]
        is_command = text.startswith("/") and readline.get_begidx() == 0
        return f"{found[index]} " if is_command and index < len(found) else None


@contextlib.contextmanager
def handling_interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have Ctrl-C handled so meanwhile, unless it is ignored: whatever started us wanted that."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Leave what is typed meanwhile to the next prompt: echoed, it would stand amid the answer."""
    if not sys.stdin.isatty():
        yield
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    changed = [*before]
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(keys, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
