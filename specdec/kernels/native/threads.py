"""OpenMP's helper threads of each thread that ran parallel torch work; the C kernels have their own."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SOFT = 1
"""`omp_pause_soft`: releases threads but keeps settings."""


class _Outside(threading.local):
    threads: int | None = None
    """The thread count before `without_helpers`; None outside of it."""


_outside = _Outside()


def dismiss_helpers() -> None:
    """Release the calling thread's helpers; its next parallel work starts new ones, in about 0.1 ms.

    libgomp's helpers, which torch uses, spin while idle as long as the process has no more of them than
    processors. Threads that take turns need each other's helpers gone.
    """
    if pause_all := _openmp("omp_pause_resource_all"):
        pause_all(SOFT)


def limit_threads(count: int) -> None:
    """Set the number of threads of the calling thread's torch operations; other threads are unaffected."""
    if setting := _openmp("omp_set_num_threads"):
        setting(count)
    else:
        torch.set_num_threads(count)


@contextmanager
def without_helpers() -> Iterator[None]:
    """Run the calling thread's torch operations single-threaded; other threads are unaffected.

    For many short operations: on a busy machine each would wait until its helpers are scheduled.
    """
    setting = _openmp("omp_set_num_threads")  # applies to this thread only
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
    """Use all threads in C kernels within `without_helpers`: they never wait for helpers not yet running."""
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
    try:
        found: Callable[[int], int] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found


# A forked child has no helpers, and would wait for them in its first parallel work.
os.register_at_fork(before=dismiss_helpers)
