"""The C kernels' thread pool with several callers: no work is lost or done twice."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from specdec.kernels.linear.integers import INT8
from specdec.kernels.native import linear
from specdec.kernels.native.compiled import compiled

pytestmark = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")

TURNS = 200


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Give each caller helpers, possibly more than there are processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_callers_at_a_time_get_their_own_results() -> None:
    """More callers than the pool has slots: some work alone."""
    weight_ND = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0))
    packed = linear.pack(INT8.quantise(weight_ND))
    inputs = [torch.randn(1 + i % 9, 256, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    torch.set_num_threads(1)
    wanted = [linear.linear(x_TD, packed) for x_TD in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(4)
        for _ in range(TURNS):
            if not torch.equal(linear.linear(inputs[number], packed), wanted[number]):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKS = """
import os
import torch
from specdec.kernels.native import linear

torch.set_num_threads(3)
packed, x_TD = linear.pack(torch.randn(3000, 512)), torch.randn(4, 512)
wanted = linear.linear(x_TD, packed)
child = os.fork()
same = all(torch.equal(linear.linear(x_TD, packed), wanted) for _ in range(100))
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitpid(child, 0)[1] == 0
"""
"""A forked child has no helpers of its parent, and starts its own."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_its_own_pool() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], check=True, timeout=120)


STOPPED = """
import os, signal, sys, threading
import torch
from specdec.kernels.native import linear

torch.set_num_threads(3)
packed, x_TD = linear.pack(torch.randn(3000, 512)), torch.randn(4, 512)
linear.linear(x_TD, packed)
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.current_thread() is threading.main_thread()))
for _ in range(20):
    os.kill(os.getpid(), signal.SIGUSR1)
    linear.linear(x_TD, packed)
assert seen and all(seen)
"""
"""Signals go to the program's own threads, and helpers do not block its exit."""


def test_helpers_take_no_signals_and_end_with_the_program() -> None:
    subprocess.run([sys.executable, "-c", STOPPED], check=True, timeout=120)


BOUND = """
import os
import torch
from specdec.kernels.native import linear

def tasks():
    return set(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
packed, x_TD = linear.pack(torch.randn(3000, 512)), torch.randn(4, 512)
(torch.randn(1 << 20) + 1).sum()  # in torch's threads, each bound to a processor of its own
before = tasks()
linear.linear(x_TD, packed)
for helper in tasks() - before:
    print(len(os.sched_getaffinity(int(helper))))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_helpers_are_not_bound_to_the_processor_of_the_thread_that_starts_them() -> None:
    """If a user binds OpenMP's threads, all helpers would otherwise share one processor."""
    bound = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", BOUND], env=bound, check=True, timeout=120, capture_output=True, text=True
    )
    assert ended.stdout.split() == ["2"]


FEW = """
import os
import torch
from specdec.kernels.native import linear

torch.set_num_threads(12)
wide, x_TD = linear.pack(torch.randn(3000, 512)), torch.randn(64, 4096)
linear.linear(torch.randn(4, 512), wide)
assert len(os.listdir("/proc/self/task")) >= 12
two = linear.pack(torch.randn(128, 4096))  # two chunks
wanted = linear.linear(x_TD, two)
assert all(torch.equal(linear.linear(x_TD, two), wanted) for _ in range(300))
"""


def test_many_helpers_and_few_chunks() -> None:
    """Helpers that may not draw chunks leave the work to the others."""
    subprocess.run([sys.executable, "-c", FEW], check=True, timeout=120)
