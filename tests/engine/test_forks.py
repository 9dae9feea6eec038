"""A forked process has a copy of the engine's memory, but not its thread."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import EXHAUSTIVE, only

PRELUDE = """
import asyncio, gc, os, signal, sys, threading, warnings
warnings.simplefilter("ignore")  # newer Pythons warn of every fork beside threads
import torch
from specdec import SamplingParams, SpecEngine
from specdec.errors import EngineError

torch.set_num_threads(2)
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
engine = SpecEngine(sys.argv[1])
alone = engine.generate([1, 2, 3], params)[0].token_ids


def told(call):
    try:
        call()
    except EngineError as error:
        assert f"runs in process {os.getppid()}, of which this one" in str(error)
        assert "is a fork; create a SpecEngine here" in str(error)
        return
    raise AssertionError("nothing was said")


def fork(child):
    process = os.fork()
    if not process:
        signal.alarm(100)  # what hangs ends by this signal, which the parent reports
        child()
        sys.exit(0)  # with the interpreter's own end: finalizers run
    assert os.waitpid(process, 0)[1] == 0
    assert engine.generate([1, 2, 3], params)[0].token_ids == alone
"""
CHILDREN = {
    "asks": """
async def stream():
    async for _ in engine.stream([1, 2, 3], params):
        pass

def child():
    told(lambda: engine.generate([1, 2, 3], params))
    told(lambda: asyncio.run(stream()))
    told(engine.flush)
    told(lambda: engine.submit([], print))

fork(child)
""",
    "closes": """
def child():
    global engine
    assert engine.close() is True
    del engine
    gc.collect()

fork(child)
""",
    "drops": """
def child():
    global engine
    del engine
    gc.collect()

fork(child)
""",
    "leaves": "fork(lambda: None)",
    "forked while the gate is held": """
def child():
    told(lambda: engine.generate([1, 2, 3], params))
    assert engine.close() is True

with engine._worker._gate:
    process = os.fork()
    if not process:
        signal.alarm(100)
        child()
        sys.exit(0)
assert os.waitpid(process, 0)[1] == 0
""",
    "makes its own": """
torch.ones(600, 600) @ torch.ones(600, 600)  # helpers of the thread that forks

def child():
    with SpecEngine(sys.argv[1]) as own:
        assert own.generate([1, 2, 3], params)[0].token_ids == alone
    assert (torch.ones(600, 600) @ torch.ones(600, 600)).sum() == 600**3

fork(child)
""",
}


@EXHAUSTIVE
@pytest.mark.parametrize("what", only({"asks", "drops"}, CHILDREN))
def test_a_forked_process_gets_an_error_and_never_hangs(what: str, hybrid: Path) -> None:
    script = f"{PRELUDE}{CHILDREN[what]}\nengine.close()"
    done = subprocess.run(
        [sys.executable, "-c", script, str(hybrid)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
