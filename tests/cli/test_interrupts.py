"""Ctrl-C at any moment: a command exits silently with 130, a script that loads a model does not abort."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.engine.thread import Worker
from specdec.setup.build import LoadedModel
from tests.selection import EXHAUSTIVE, only

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

COMMANDS = {
    "generate": ["generate", "tiny", "--prompt", "x", "--max-tokens", "500", "--ignore-eos"],
    "serve": ["serve", "tiny", "--port", "0"],
    "demo": ["demo"],
    "throughput": ["bench", "throughput", "tiny"],
    "top": ["top", "http://127.0.0.1:9", "--once"],
}

AT_IMPORT = """
import os, signal, sys
times, module = int(sys.argv.pop(1)), sys.argv.pop(1)

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
import specdec.__main__
sys.argv[0] = "specdec"
specdec.__main__.main()
"""
"""Sends Ctrl-C during the search for a module."""


def run(*argv: str, **more: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *argv], env=ENVIRONMENT | more, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("command", "module"),
    only(
        {("generate", "torch.nn"), ("serve", "aiohttp"), ("top", "specdec.cli.top.view")},
        [
            ("generate", "argparse"),
            ("generate", "pydantic"),
            ("generate", "numpy"),
            ("generate", "torch.nn"),
            ("generate", "specdec.engine.engine"),
            ("serve", "aiohttp"),
            ("serve", "specdec.server.run"),
            ("demo", "specdec.cli.demo"),
            ("throughput", "transformers"),
            ("top", "specdec.cli.top.view"),
        ],
    ),
)
def test_it_ends_what_is_imported(command: str, module: str, tmp_path: Path) -> None:
    argv = [word.format(folder=tmp_path) for word in COMMANDS[command]]
    ran = run("-c", AT_IMPORT, "1", module, *argv)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_a_module_that_swallows_it_does_not_keep_the_process(tmp_path: Path) -> None:
    (tmp_path / "aiohttp.py").write_text("try:\n    import no_such_module\nexcept BaseException:\n    pass\n")
    ran = run("-c", AT_IMPORT, "1", "no_such_module", *COMMANDS["top"], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


AT_STAGE = """
import os, signal, sys, threading, time
times, module, name, delay = int(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1), float(sys.argv.pop(1))

import importlib
owner = importlib.import_module(module)
inner = getattr(owner, name)

def press():
    time.sleep(delay)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

def pressed(*values, **fields):
    threading.Thread(target=press, daemon=True).start()
    return inner(*values, **fields)

setattr(owner, name, pressed)
import specdec.__main__
sys.argv[0] = "specdec"
specdec.__main__.main()
"""
"""Sends Ctrl-C a given time after a stage of loading has begun."""


@EXHAUSTIVE
@pytest.mark.parametrize(
    ("command", "stage", "delay", "times"),
    only(
        lambda case: case[2] in ("0.001", "0.05", "0.01"),
        [
            ("generate", "specdec.setup.build.open_model", "0", 2),
            ("generate", "specdec.setup.build.load_tokenizer", "0.001", 1),
            ("generate", "specdec.setup.build.open_weights", "0.002", 2),
            ("generate", "specdec.setup.build.assemble", "0", 1),
            ("generate", "specdec.setup.build.warm_up", "0.02", 2),
            ("generate", "specdec.setup.build.warm_up", "0.05", 1),
            ("generate", "specdec.setup.build.warm_up", "0.2", 2),
            ("serve", "specdec.setup.build.warm_up", "0.01", 1),
            ("demo", "specdec.setup.build.warm_up", "0.1", 2),
            ("throughput", "specdec.setup.build.warm_up", "0.03", 1),
        ],
    ),
)
def test_it_ends_a_model_that_is_loaded(command: str, stage: str, delay: str, times: int) -> None:
    module, _, name = stage.rpartition(".")
    ran = run("-c", AT_STAGE, str(times), module, name, delay, *COMMANDS[command])
    said = [line for line in ran.stderr.splitlines() if line.strip() and "own small model" not in line]
    if command == "serve":  # only its log
        said = [line for line in said if not re.match(r"20\d\d-|settings:|  \w+: ", line)]
    assert (ran.returncode, said) == (130, []), ran.stderr


READY = """
import signal, sys
inner = signal.signal

def told(number, handler):
    before = inner(number, handler)
    signal.signal = inner
    print("ready", flush=True)
    return before

signal.signal = told
import specdec.__main__
sys.argv[0] = "specdec"
specdec.__main__.main()
"""
"""Prints when Ctrl-C is handled by us: before that the starting interpreter handles it."""


@pytest.mark.parametrize("seconds", only({0.3, 1.8}, [0, 0.05, 0.3, 1.0, 1.8, 2.2, 2.6, 3.0]))
def test_it_ends_at_any_time(seconds: float) -> None:
    # The text is far too long to be complete by then, so only the signal can end it.
    argv = [*COMMANDS["generate"][:-2], "1000000", "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-c", READY, *argv],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors and "abort" not in errors, errors


SCRIPT = """
import os, signal, threading, time
from specdec import SpecEngine
import specdec.setup.build

def press():
    time.sleep({delay})
    os.kill(os.getpid(), signal.SIGINT)

inner = specdec.setup.build.warm_up

def pressed(*values):
    threading.Thread(target=press, daemon=True).start()
    for _ in range(1000):
        inner(*values)

specdec.setup.build.warm_up = pressed
try:
    SpecEngine("tiny")
except KeyboardInterrupt:
    print("interrupted")
    left = [thread for thread in threading.enumerate() if thread.name == "specdec-engine"]
    print(len(left))
"""


@pytest.mark.parametrize("delay", only({0.05}, [0.0, 0.05, 0.4]))
def test_a_script_interrupted_while_loading_exits(delay: float) -> None:
    ran = run("-c", SCRIPT.format(delay=delay))
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["interrupted", "0"], "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + AT_IMPORT
    ran = run("-c", ignoring, "1", "argparse", "--version")
    assert ran.returncode == 0 and ran.stdout.startswith("specdec ")


class Begun(threading.Thread):
    """Interrupted once it has begun to build."""

    def start(self) -> None:
        super().start()
        assert BUILDING.wait(60)
        raise KeyboardInterrupt


class Beginning(threading.Thread):
    """Interrupted before it builds; the test lets the thread run later."""

    def start(self) -> None:
        LATE.append(super().start)
        raise KeyboardInterrupt


BUILDING, LATE = threading.Event(), list[Callable[[], None]]()


@pytest.mark.parametrize(("kind", "builds"), [(Begun, True), (Beginning, False)])
def test_a_thread_that_is_only_just_started_builds_nothing_on(
    kind: type[threading.Thread], builds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUILDING.clear()
    before = set(threading.enumerate())

    def make() -> LoadedModel:
        BUILDING.set()
        while True:
            time.sleep(0.001)

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", kind)
        with pytest.raises(KeyboardInterrupt):
            Worker(make)
    for start in LATE:
        start()
    LATE.clear()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()
    assert BUILDING.is_set() == builds
