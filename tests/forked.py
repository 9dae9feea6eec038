"""Run `python -m MODULE ARGUMENTS` as a fork of a process that has torch, transformers and aiohttp imported.

These imports are most of a small server's start-up time. The forked process has one thread and has only
imported modules, so a fork behaves like a new interpreter, except that variables read during those imports
(OMP_NUM_THREADS) have the values of the test's own environment.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from threading import Lock
from types import SimpleNamespace
from typing import IO, Any

from specdec.text.grammar import template

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preloaded"])
_LOCK = Lock()
"""Held while a process is started or its exit code is read, which is possible only once."""


class ForkedProcess:
    """The methods of `subprocess.Popen` that server tests call."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], output: int, channel: int | None = None
    ) -> None:
        """Fork, with stdout and stderr to a descriptor; a channel's descriptor replaces the last argument."""
        assert list(command[:2]) == [sys.executable, "-m"]
        given = [Connection(os.dup(own)) for own in (output, channel) if own is not None]
        forkserver.ensure_running()
        authkey = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # since Python 3.14
        self._process = _CONTEXT.Process(
            target=_run, args=(command[2:], dict(env), authkey, *given), daemon=channel is not None
        )
        with _LOCK:
            self._process.start()
        for own in given:
            own.close()
        assert self._process.pid
        self.pid = self._process.pid
        atexit.register(self.kill)  # multiprocessing waits for processes left running by a test

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_to_pipe(command: Sequence[str], env: Mapping[str, str]) -> tuple[ForkedProcess, IO[str]]:
    """Start a fork; return it with a reader of its output."""
    reader, writer = os.pipe()
    try:
        return ForkedProcess(command, env, writer), os.fdopen(reader, encoding="utf-8")
    finally:
        os.close(writer)


def _run(
    command: Sequence[str],
    env: Mapping[str, str],
    authkey: bytes | None,
    output: Connection,
    channel: Connection | None = None,
) -> None:
    """Run the module in this process as `python -m` does, with unbuffered output."""
    module, *arguments = command
    if channel:
        arguments[-1] = str(channel.fileno())
    stream: Any
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        stream.reconfigure(write_through=True)
    output.close()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    # Engines in this process fork their grammar processes from the same fork server.
    server: Any = forkserver._forkserver
    server.ensure_running = lambda: None
    if authkey:
        server._forkserver_authkey = authkey
    named: Any = template
    named.subprocess = FORKING
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # as at an interpreter's exit; multiprocessing skips them


def _fork_grammar(
    command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any
) -> ForkedProcess:
    with open(os.devnull, "w") as nowhere:
        return ForkedProcess(command, env, nowhere.fileno(), *pass_fds)


FORKING = SimpleNamespace(Popen=_fork_grammar, DEVNULL=subprocess.DEVNULL)
"""Replaces `subprocess` in the grammar template."""
