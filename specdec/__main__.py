"""The entry of the command: light, and the one place where its process ends."""

import errno
import gc
import os
import signal
import sys

TYPE_CHECKING = False  # as in specdec/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

FAILED, INTERRUPTED, READER_GONE = 1, 130, 141
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
STDERR = 2
OURS = "specdec-"
"""How the names of our threads begin."""


def main() -> "NoReturn":
    """Import the command, run it, and end the process.

    A thread that builds an engine may be in C++: an interpreter that is torn down unwinds it, which aborts
    the process. So where the command was interrupted, or leaves such a thread behind, it ends at once.
    """
    try:
        code = _run()
        if code == INTERRUPTED or _is_at_work():
            _leave(code)
    except KeyboardInterrupt:  # a second one, while the first is dealt with
        _leave(INTERRUPTED)
    sys.exit(code)


def _run() -> int:
    """Run the command and write its output; Ctrl-C ends the process until it begins, then it answers that.

    Garbage is collected from then on, and never among what was imported, which holds none worth finding:
    looking for it takes a sixth of the time of the imports, and would stall requests for 0.1 s later.
    """
    gc.disable()
    # Whatever started us may have had Ctrl-C ignored, as a shell does for what it runs in the background.
    if is_heard := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Some modules swallow an exception that is raised while they are imported.
        signal.signal(signal.SIGINT, _leave_now)

    def begin() -> None:
        gc.freeze()
        gc.enable()
        if is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # it may be closed
    try:
        code = _command(begin)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return READER_GONE
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _drop_output()
            _say(f"specdec: the output cannot be written ({error.strerror}); make room, or write elsewhere")
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, _leave_now)


def _command(on_start: "Callable[[], None]") -> int:
    """Run the command; print the message of a SystemExit."""
    try:
        from specdec import cli

        return cli.main(on_start=on_start)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        _say(ended.code)
        return FAILED


def _say(text: str) -> None:
    from contextlib import suppress

    with suppress(OSError):
        print(text, file=sys.stderr)


def _drop_output() -> None:
    """Send what Python still holds back of the output nowhere, so that it does not fail again at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_at_work() -> bool:
    import threading

    return any(thread.daemon and thread.name.startswith(OURS) for thread in threading.enumerate())


def _leave_now(number: int, frame: object) -> "NoReturn":
    if os.isatty(STDERR):
        os.write(STDERR, b"\n")  # after the terminal's ^C, or a bar
    os._exit(INTERRUPTED)


def _leave(code: int) -> "NoReturn":
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is full, closed, or not there at all
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
