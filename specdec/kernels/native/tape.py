"""Make the same calls again: what a GPU does with a graph, for windows whose calls are short.

While a tape is recorded everything runs as ever. Every call of a C form is noted with its arguments, and all
memory that was made is kept, so that the same calls can be made of the same memory from one list in C. What
they read must be put where it lay. Anything else that computes cannot be played again, and is refused.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.native.call import listening
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.signatures import FORMS, NUMBERS

_aten = torch.ops.aten
MAKES = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)


class Tape:
    """Records what is called while it is entered."""

    def __init__(self) -> None:
        self.refused: str | None = None
        """What cannot be played again."""
        self._calls: list[int] = []
        self._kept: list[Tensor] = []
        self._played: Tensor | None = None
        self._watch = _Watch(self)

    def __enter__(self) -> "Tape":
        listening.recorder = self
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listening.recorder = None
        self._watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._played = torch.tensor(self._calls, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """What is kept to be computed in again."""
        return sum(x.nbytes for x in self._kept)

    def call(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Take a call down, and make it."""
        self._note(name, arguments)
        function(*arguments)

    def _note(self, name: str, arguments: Sequence[int | float | None]) -> None:
        """Write a call as its function's number and its arguments, eight bytes each."""
        kinds = FORMS.get(name)
        if kinds is None:
            self.refused = name
            return
        self._calls.append(NUMBERS[name])
        for kind, value in zip(kinds, arguments, strict=True):
            bits = ctypes.c_uint32.from_buffer(ctypes.c_float(value or 0.0)).value if kind == "f" else value
            self._calls.append(int(bits or 0))

    def watch(self, operation: Any, result: Any, arguments: tuple[Any, ...]) -> None:
        """Keep what torch makes; whatever it computes cannot be played again."""
        if operation in MAKES:
            self._kept.append(result)
        elif not operation.is_view or not _shares(result, arguments[0]):
            self.refused = str(operation)

    def play(self) -> None:
        """Make all the calls again."""
        assert self._played is not None and not self.refused
        start = self._played.data_ptr()
        _replay()(start, start + self._played.nbytes)


class _Watch(TorchDispatchMode):
    """Tells a tape of all that torch does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch's compiler out: skipped by it, each call is slower, and the first imports it."""
        return False

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tape.watch(func, result, args)
        return result


def _shares(result: Any, source: Tensor) -> bool:
    """Tell whether a view is one: some only are where nothing had to be converted."""
    parts = result if isinstance(result, list | tuple) else [result]
    return all(part.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() for part in parts)


@functools.cache
def _replay() -> Any:
    loaded = compiled()
    assert loaded is not None
    loaded.replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.replay.restype = None
    return loaded.replay
