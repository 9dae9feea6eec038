"""Record calls and replay them: a CUDA graph for the CPU, for windows with short calls.

While a tape is recording everything runs normally. Each C kernel call is noted with its arguments, and so are
torch's operations on small tensors in between (tensor_ops.py). The tape keeps all allocated memory, so that C
can repeat the same calls on it from one list. Inputs must be copied to their recorded addresses before a
replay.

Other computations cannot be replayed, so the tape is refused. So are host reads of tensor values, since a
value may differ in the next replay.
"""

import ctypes
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.native.call import listening
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.signatures import NUMBERS, SIGNATURES
from specdec.kernels.native.tensor_ops import TensorOps, Unrecordable

_aten = torch.ops.aten
MAKES = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
CONSTANT = ("arange", "lift_fresh", "scalar_tensor")
"""Operations whose result is constant."""
DUNDERS = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
ASKS = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.item,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)
MOST_KEYS = 256
"""Maximum number of entries, recorded or refused."""
MOST_BYTES = 256 << 20
"""Maximum bytes of all tapes of one pass over one arena: a window of 8 through 36 layers takes 26 MB."""
SHARE = 8
"""Maximum share of one tape: large alternating ones would evict each other."""
COME, REFUSED = "come once", "refused"


class Tape:
    """Records calls between enter and exit."""

    def __init__(self) -> None:
        self.refused: str | None = None
        """An operation that cannot be replayed, if any."""
        self._calls: list[int] = []
        self._made: dict[int, Tensor] = {}
        """Created tensors by address."""
        self._constant = set[int]()
        """Addresses of constant tensors."""
        self._kept: list[Tensor] = []
        """Operation lists and the tensors that they refer to."""
        self._played: Tensor | None = None
        self._list_bytes = 0
        self._ops: TensorOps | None = TensorOps(self._note_op, self._kept.append)
        self._watches: tuple[_Watch | _Questions, ...] = (_Watch(self), _Questions(self))

    def __enter__(self) -> "Tape":
        listening.recorder = self
        for watch in self._watches:
            watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        listening.recorder = None
        for watch in reversed(self._watches):
            watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._played = torch.tensor(self._calls, dtype=torch.int64)
        self._watches, self._ops = (), None  # break the reference cycles with the tape

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers kept for replay."""
        return self._list_bytes + sum(x.untyped_storage().nbytes() for x in self._made.values())

    def call(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Record a call and make it."""
        self._note(name, arguments)
        function(*arguments)

    def _note(self, name: str, arguments: Sequence[int | float | None]) -> None:
        """Append a call: its function's number and its arguments, eight bytes each."""
        kinds = SIGNATURES.get(name)
        if kinds is None:
            self.refused = name
            return
        self._calls.append(NUMBERS[name])
        for kind, value in zip(kinds, arguments, strict=True):
            bits = ctypes.c_uint32.from_buffer(ctypes.c_float(value or 0.0)).value if kind == "f" else value
            self._calls.append(int(bits or 0))

    def _note_op(self, list_X: Tensor) -> None:
        self._kept.append(list_X)
        self._list_bytes += list_X.nbytes
        self._note("tensor_op", [list_X.data_ptr()])

    def watch(self, operation: Any, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record a torch operation, or keep its result if its inputs are constant."""
        name = name_of(operation)
        inputs = _tensors(args)
        if "out" in kwargs:
            self.refused = f"{name} into a tensor of its own"
        if (operation.is_view or name == "_unsafe_view") and _shares(result, args[0]):
            return
        if operation in MAKES:
            self._keep_made(result)
        elif _tensors([result]) and _shares(result, inputs[0] if inputs else None):  # in place, or unchanged
            if self._is_constant(inputs[0]):
                self.refused = f"{name} of a constant"
            self._record(name, result, args, kwargs)
        elif name in CONSTANT or (inputs and all(map(self._is_constant, inputs))):
            self._keep_made(result)
            self._constant.update(_place(x) for x in _tensors([result]))
        else:
            self._keep_made(result)
            self._record(name, result, args, kwargs)

    def _record(self, name: str, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        assert self._ops is not None
        try:
            self._ops.record(name, result, args, kwargs)
        except (Unrecordable, TypeError) as error:  # unknown arguments
            self.refused = f"{name}: {error}"

    def _keep_made(self, result: Any) -> None:
        self._made |= {_place(x): x for x in _tensors([result])}

    def _is_constant(self, x: Tensor) -> bool:
        return _place(x) in self._constant

    def play(self) -> None:
        """Replay all calls."""
        assert self._played is not None and not self.refused
        start = self._played.data_ptr()
        _replay()(start, start + self._played.nbytes)


class HasTape(Protocol):
    """A recording: a tape and the tensors it is replayed on."""

    @property
    def tape(self) -> Tape: ...


Taped = TypeVar("Taped", bound=HasTape)


class Tapes(Generic[Taped]):
    """Tapes by key; the least recently used is evicted first."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, str | Taped] = OrderedDict()

    def of(self, key: Hashable) -> str | Taped | None:
        """Return a key's entry and mark it as recently used."""
        if key in self._by_key:
            self._by_key.move_to_end(key)
        return self._by_key.get(key)

    def sizes(self) -> tuple[int, int]:
        """Return the number of tapes and their bytes."""
        sizes = [entry.tape.nbytes for entry in self._by_key.values() if not isinstance(entry, str)]
        return len(sizes), sum(sizes)

    def keep(self, key: Hashable, recorded: Taped) -> None:
        """Store a recording, or a refusal if it cannot be replayed or is too large."""
        tape = recorded.tape
        self.note(key, REFUSED if tape.refused or tape.nbytes > MOST_BYTES // SHARE else recorded)

    def note(self, key: Hashable, entry: str | Taped) -> None:
        """Store an entry and evict the oldest beyond the bounds."""
        self._by_key[key] = entry
        self._by_key.move_to_end(key)
        nbytes = sum(other.tape.nbytes for other in self._by_key.values() if not isinstance(other, str))
        while len(self._by_key) > MOST_KEYS or nbytes > MOST_BYTES:
            _, oldest = self._by_key.popitem(last=False)
            nbytes -= 0 if isinstance(oldest, str) else oldest.tape.nbytes


class _Watch(TorchDispatchMode):
    """Passes torch's operations to a tape."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: skipping dynamo makes each call slower, and the first one would import it."""
        return False

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in MAKES and not TensorOps.knows(name_of(func)) and func._can_decompose():
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.tape.watch(func, result, args, kwargs or {})
        return result


class _Questions(TorchFunctionMode):
    """Refuses a tape if the host reads a tensor's value."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in ASKS:
            self.tape.refused = f"{func.__name__}, which asks what a tensor holds"
        return func(*args, **(kwargs or {}))


def name_of(operation: Any) -> str:
    """Return an operation's name without the in-place suffix."""
    name: str = operation._schema.name.partition("::")[2]
    return DUNDERS.get(name) or name.removesuffix("_")


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among values and in lists and tuples of them."""
    flat = (part for value in values for part in (value if isinstance(value, list | tuple) else [value]))
    return [x for x in flat if isinstance(x, Tensor)]


def _place(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _shares(result: Any, source: Any) -> bool:
    """Return whether a result shares its source's memory, as some views and no-op conversions do."""
    return isinstance(source, Tensor) and all(_place(part) == _place(source) for part in _tensors([result]))


@functools.cache
def _replay() -> Any:
    loaded = compiled()
    assert loaded is not None
    loaded.replay.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.replay.restype = None
    return loaded.replay
