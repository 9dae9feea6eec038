"""A thread that has nothing to do keeps no helpers of OpenMP's awake."""

import os
import threading

import pytest
import torch

from specdec import SamplingParams, SpecEngine, worker
from specdec.kernels.native.threads import dismiss_helpers


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_helpers_go_and_come_again() -> None:
    counts: list[int] = []

    def work() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        x = torch.ones(1 << 20)
        for _ in range(2):
            x += 1
            counts.append(tasks())
            dismiss_helpers()
            counts.append(tasks())
        torch.set_num_threads(before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    awake, gone, again, gone_again = counts
    assert awake >= gone + 2 and again == awake and gone_again == gone


def test_an_engine_dismisses_them_whenever_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Semaphore(0)
    monkeypatch.setattr(worker, "dismiss_helpers", waits.release)
    with SpecEngine("tiny", draft="none", max_model_len=256) as engine:
        for _ in range(3):
            assert waits.acquire(timeout=60)
            engine.generate(["import os"], SamplingParams(max_tokens=2, temperature=0.0))
        assert waits.acquire(timeout=60)
