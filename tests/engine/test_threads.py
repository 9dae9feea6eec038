"""An idle thread keeps no OpenMP helper threads awake."""

import subprocess
import sys
import threading

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.engine import thread

ALONE = """
import os, time
import torch
from specdec.kernels.native.threads import dismiss_helpers

def tasks():
    return set(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before, x = tasks(), torch.empty(1 << 20)
for _ in range(2):
    x.fill_(1)
    helpers = tasks() - before
    assert len(helpers) == 2, helpers
    dismiss_helpers()
    while helpers & tasks():  # a thread that has ended is listed for a moment
        time.sleep(0.01)
"""
"""Run in a new process, which has no other threads that could be mistaken for helpers."""


def test_helpers_go_and_come_again() -> None:
    """If they did not end, this would wait for them until it times out."""
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=120)


def test_an_engine_dismisses_them_whenever_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Semaphore(0)
    monkeypatch.setattr(thread, "dismiss_helpers", waits.release)
    with SpecEngine("tiny", draft="none", max_model_len=256) as engine:
        for _ in range(3):
            assert waits.acquire(timeout=60)
            engine.generate(["import os"], SamplingParams(max_tokens=2, temperature=0.0))
        assert waits.acquire(timeout=60)
