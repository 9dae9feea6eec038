"""A thread that has nothing to do keeps no helpers of OpenMP's awake."""

import os
import threading

import torch

from specdec import SamplingParams, SpecEngine
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


def test_an_engine_that_waits_has_none() -> None:
    threads, before = torch.get_num_threads(), tasks()
    torch.set_num_threads(3)
    try:
        with SpecEngine("tiny", draft="none", max_model_len=512) as engine:
            engine.generate(["import os\n" * 40], SamplingParams(max_tokens=2, temperature=0.0))
            for _ in range(1000):
                if tasks() <= before + 1:
                    break
                threading.Event().wait(0.01)
            assert tasks() <= before + 1  # the engine's own thread
    finally:
        torch.set_num_threads(threads)
