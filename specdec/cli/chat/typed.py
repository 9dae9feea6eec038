"""Typed messages of one line or several, edited by readline."""

import contextlib
import re
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from specdec.cli.chat.history import ChatHistory
from specdec.cli.chat.view import ChatView

try:
    import readline
except ImportError:  # a Python built without readline: no editing
    readline = None  # type: ignore[assignment]

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
QUOTED = re.compile(rf"(/\w+\s+)?{QUOTES}")
"""A message, or a command's argument, that continues to the next quotes."""
LEAVE = "Ctrl-D or /bye ends the chat."


def read_message(read: Callable[[str], str]) -> str:
    """Read lines until they form a message.

    A message that starts with three quotes ends with three quotes; a backslash at the end of a line continues
    it.
    """
    text = read(PROMPT)
    if match := QUOTED.match(text):
        text = text[match.end() :]
        while not text.rstrip().endswith(QUOTES):
            text += f"\n{read(MORE)}"
        quoted = text.rstrip().removesuffix(QUOTES).removeprefix("\n").removesuffix("\n")
        return (match[1] or "") + quoted
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{read(MORE)}"
    return text


class Keyboard:
    """Read messages from a terminal, with readline if Python has it."""

    def __init__(self, view: ChatView, words: Sequence[str], history: ChatHistory) -> None:
        """Set up completion of these words, and the history."""
        self._view, self._words = view, words
        self._history: ChatHistory | None = history
        self._given = ""
        self._is_empty = True
        """Whether nothing had been typed when Ctrl-C came."""
        if readline is None:
            return
        is_editline = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_editline else "tab: complete")
        if not is_editline:  # pasted lines then form one message
            readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)
        readline.set_completer_delims(" \n")
        readline.set_completer(self._complete)
        with self._keeping_history():
            for entry in history.read():
                readline.add_history(entry)

    def read(self, prefill: str = "") -> str:
        """Return the next message; `prefill` is offered for editing. Raises EOFError at the end."""
        self._given = prefill
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
                self._view.error("The input is not UTF-8; set the terminal to UTF-8.")
                continue
            if text.strip():
                self._recall(text)
                return text

    def _line(self, prompt: str) -> str:
        prefill, self._given = self._given, ""
        if readline is None or not sys.stdout.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
            return input()
        readline.set_startup_hook((lambda: readline.insert_text(prefill)) if prefill else None)
        self._is_empty = prompt == PROMPT
        return input(prompt)

    @contextlib.contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Note whether the line is empty at Ctrl-C: once `input` has raised, its text is gone."""

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
        """Warn once if the history cannot be written."""
        try:
            yield
        except OSError as error:
            self._history = None
            self._view.notice(f"The input history is not saved: {error}")

    def _complete(self, text: str, index: int) -> str | None:
        """Complete a command's name."""
        assert readline is not None
        matches = [word for word in self._words if word.startswith(text)]
        is_command = text.startswith("/") and readline.get_begidx() == 0
        return f"{matches[index]} " if is_command and index < len(matches) else None


@contextlib.contextmanager
def handling_interrupts(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C in the block, unless it is ignored, as the parent process wanted."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """Leave input typed meanwhile to the next prompt, without echoing it into the answer."""
    keys = sys.stdin.fileno()
    saved = termios.tcgetattr(keys)
    modified = [*saved]
    modified[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(keys, termios.TCSADRAIN, modified)
    try:
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, saved)
