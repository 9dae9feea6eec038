"""The engine's end of the grammar processes: the template, and a link to each fork of it."""

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

from specdec.errors import CLOSED, EngineError, RequestError
from specdec.text.grammar.places import Places
from specdec.text.grammar.wire import HEAD, framed

logger = logging.getLogger(__name__)

START_S = 60.0
"""Seconds for the template to load on a busy machine."""
SEND_S = 1.0
"""Seconds for an idle process to receive a frame."""
MOST, MOST_EACH = 32, 24
"""Maximum concurrent grammar processes, in total and per caller. See `child.MOST_BYTES`."""
READ_BYTES = 1 << 16


class Link:
    """A socket to one grammar's process, which exits when this is closed or collected. Not thread-safe.

    `freed` is called then, once; the garbage collector may call it anywhere.
    """

    def __init__(self, sock: socket.socket, freed: Callable[[], None] = lambda: None) -> None:
        self._sock = sock
        self._end = weakref.finalize(self, _end, sock, freed)
        self._sock.settimeout(SEND_S)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._read = bytearray()
        self.is_over = False
        """The process has ended."""
        self.heard_s = 0.0
        """Time of the last frame (`time.monotonic`)."""

    def send(self, data: bytes) -> bool:
        """Send a frame; return whether the process is still there."""
        try:
            self._sock.sendall(framed(data))
        except OSError:
            self.close()
        return not self.is_over

    def frames(self, limit_s: float) -> Iterator[bytes]:
        """Yield the frames that have arrived; if none, wait up to the limit for the first."""
        while not self.is_over and self._poll.poll(max(limit_s, 0.0) * 1e3):
            limit_s = 0.0
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self.close()
            self.heard_s = time.monotonic()
            self._read += data
            while (frame := self._next()) is not None:
                yield frame

    def _next(self) -> bytes | None:
        if len(self._read) < HEAD.size:
            return None
        (length,) = HEAD.unpack_from(self._read)
        end = HEAD.size + length
        if len(self._read) < end:
            return None
        frame = bytes(self._read[HEAD.size : end])
        del self._read[:end]
        return frame

    def close(self) -> None:
        self.is_over = True
        self._end()


def _end(sock: socket.socket, freed: Callable[[], None]) -> None:
    sock.close()
    freed()


class Template:
    """The process that has the vocabulary loaded; the first copy starts it. Thread-safe."""

    def __init__(self, tokenizer: str, size: int, vocab: int, eos: list[int]) -> None:
        self._setup = json.dumps([tokenizer, size, vocab, eos]).encode()
        self.command = [sys.executable, "-m", "specdec.text.grammar.child"]
        self._lock = threading.Lock()
        self.places = Places(MOST, MOST_EACH)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.is_closed = False

    def copy(self, caller: str, limit_s: float) -> Link:
        """Return a link to a new fork. It holds one of a few slots until closed or collected."""
        if not self.places.take(caller, limit_s):
            raise TimeoutError
        try:
            with self._lock:
                try:
                    sock = self._fork()
                except OSError as error:
                    # It may have been killed by the system, for lack of memory.
                    logger.warning("the grammar process is restarted: %s", error)
                    self._end()
                    sock = self._fork()
        except BaseException as error:
            self.places.give_back(caller)
            if isinstance(error, OSError):
                raise RequestError(
                    "structured_outputs: the grammar process cannot be started; "
                    "check that llguidance can be imported, and free memory.",
                    field="structured_outputs",
                ) from None
            raise
        return Link(sock, partial(self.places.give_back, caller))

    def start(self) -> None:
        """Load the vocabulary now, so that the first grammar does not wait for it."""
        with self._lock:
            if not self.is_closed and self._control is None:
                self._control = self._start()

    def stop(self) -> None:
        """Stop the process until the next copy, unless it is being started or forked now."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Stop the template for good; its forks end with their links."""
        self.is_closed = True
        if process := self._process:
            process.kill()  # the lock is held while it loads
        with self._lock:
            self._end()

    def _fork(self) -> socket.socket:
        if self.is_closed:
            raise EngineError(CLOSED)
        control = self._control = self._control or self._start()
        control.sendall(b"+")
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            raise ConnectionError
        os.set_inheritable(fds[0], False)
        return socket.socket(fileno=fds[0])

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # The same module path; its own session, so that Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "RAYON_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.settimeout(START_S)
        try:
            ours.sendall(framed(self._setup))
            if not ours.recv(HEAD.size + 1):
                raise ConnectionError
        except OSError:
            ours.close()
            raise
        return ours

    def _end(self) -> None:
        if self._control:
            self._control.close()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
