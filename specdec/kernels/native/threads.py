"""The helpers that OpenMP keeps for each thread in which torch shared work; the C kernels have their own."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SOFT = 1
"""Threads go, settings stay: `omp_pause_soft`."""


class _Outside(threading.local):
    threads: int | None = None
    """What a thread had before `without_helpers`; None: it is not within."""


_outside = _Outside()


def dismiss_helpers() -> None:
    """Send the calling thread's helpers home; its next shared work calls new ones, in some 0.1 ms.

    Those of libgomp, torch's, wait for work awake, but only while a process has no more of them than
    processors: threads that take turns each need the others' to be gone.
    """
    if pause := _openmp("omp_pause_resource_all"):
        pause(SOFT)


@contextmanager
def without_helpers() -> Iterator[None]:
    """Run torch's operations of the calling thread, and of no other, in that thread alone.

    For many short operations: where other processes are busy, helpers wait for a processor in each of them.
    """
    setting = _openmp("omp_set_num_threads")  # of this thread alone
    if setting is None:
        yield
        return
    outer, threads = _outside.threads, torch.get_num_threads()
    _outside.threads = outer or threads
    setting(1)
    try:
        yield
    finally:
        setting(threads)
        _outside.threads = outer


@contextmanager
def with_helpers() -> Iterator[None]:
    """Use all threads in C kernels within `without_helpers`: they wait for no helper that has not started."""
    setting, threads = _openmp("omp_set_num_threads"), _outside.threads
    if setting is None or threads is None:
        yield
        return
    setting(threads)
    try:
        yield
    finally:
        setting(1)


@functools.cache
def _openmp(name: str) -> Callable[[int], int] | None:
    """Return one of OpenMP's own functions, where it has it."""
    try:
        found: Callable[[int], int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


# A process that is forked has none of them, and would wait for them in its first shared work.
os.register_at_fork(before=dismiss_helpers)
