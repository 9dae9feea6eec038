"""Detect memory that one program of a launch writes and another accesses: a GPU does not order them.

Triton's interpreter runs programs in sequence, so a race does not change results there. Here the address of
every access is recorded, and compared after each launch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Race(NamedTuple):
    """A conflict between programs of a kernel."""

    kernel: str
    argument: str


class Races:
    """Collect the conflicts of launches."""

    def __init__(self) -> None:
        self.launches = Counter[str]()
        self.found: dict[Race, list[int]] = defaultdict(list)
        """The addresses of each race."""
        self._touched: list[tuple[tuple[int, int, int], bool, np.ndarray]] = []

    def note(self, pointers: Any, mask: Any, *, writes: bool) -> None:
        """Record an access of the running program."""
        address, touches = np.broadcast_arrays(pointers.data, np.asarray(mask.data, dtype=bool))
        program = interpreter.interpreter_builder.grid_idx
        self._touched.append((program, writes, np.unique(address[touches])))

    def compare(self, executor: GridExecutor, given: dict[str, Any]) -> None:
        """Record addresses that two programs share and one writes, then clear the launch's accesses."""
        touched, self._touched = self._touched, []
        kernel = f"{executor.fn.__module__.removeprefix('specdec.kernels.')}.{executor.fn.__name__}"
        self.launches[kernel] += 1
        by_program: dict[tuple[int, int, int], list[np.ndarray]] = defaultdict(list)
        for program, _, address in touched:
            by_program[program].append(address)
        if len(by_program) < 2:
            return
        each = [np.unique(np.concatenate(own)) for own in by_program.values()]
        address, programs = np.unique(np.concatenate(each), return_counts=True)
        written = [address for _, writes, address in touched if writes]
        shared = np.intersect1d(address[programs > 1], np.concatenate(written or [address[:0]]))
        for at in shared.tolist():
            self.found[Race(kernel, _owner(given, at))].append(at)


def _owner(given: dict[str, Any], address: int) -> str:
    """Return the first argument whose memory contains an address."""
    for name, value in given.items():
        if isinstance(value, Tensor) and value.numel():
            size = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True)) + 1
            if value.data_ptr() <= address < value.data_ptr() + size * value.itemsize:
                return name
    return "?"


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Races]:
    """Watch every launch in the block."""
    races = Races()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    call = GridExecutor.__call__

    def noted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        races.note(pointers, mask, writes=False)
        return load(self, pointers, mask, *rest)

    def noted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        races.note(pointers, mask, writes=True)
        return store(self, pointers, value, mask, *rest)

    def launch(self: Any, *args: Any, **named: Any) -> None:
        call(self, *args, **named)
        races.compare(self, {**dict(zip(self.arg_names, args, strict=False)), **named})

    def atomic(*_: Any) -> Any:
        raise AssertionError("an atomic operation: say here what it may meet")

    with patch.context() as own:
        own.setattr(InterpreterBuilder, "create_masked_load", noted_load)
        own.setattr(InterpreterBuilder, "create_masked_store", noted_store)
        own.setattr(InterpreterBuilder, "create_atomic_rmw", atomic)
        own.setattr(InterpreterBuilder, "create_atomic_cas", atomic)
        own.setattr(GridExecutor, "__call__", launch)
        yield races
