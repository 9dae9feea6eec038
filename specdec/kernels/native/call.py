"""Calls from Python into the C kernels: supported tensors and argument passing."""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.native.compiled import MOST, compiled
from specdec.kernels.native.signatures import ARGUMENTS, KINDS, SUFFIX, Count, Pointer
from specdec.kernels.strides import dense, outer_strides

TOKENS = 8192
"""Widest step that runs in C; wider ones run in torch, which rounds differently.

A chain of this length fits on a thread's stack.
"""


class Records(ctypes.Structure):
    """Mirror `records` of narrow.c."""

    _fields_ = [
        *((name, Pointer) for name in ("update", "decay")),
        *((name, Count) for name in ("update_slab", "update_index", "decay_slab", "decay_index")),
    ]


class Recorder(Protocol):
    """Receives every call of this thread, and must make it."""

    def call(self, name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None: ...


class _Listening(threading.local):
    recorder: Recorder | None = None


listening = _Listening()


def function(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """Return a C function; while a recorder is active, a wrapper that passes its calls to the recorder."""
    found, recorder = _function(name, dtype), listening.recorder
    if recorder is None:
        return found

    return lambda *arguments: recorder.call(full_name(name, dtype), found, arguments)


def full_name(name: str, dtype: torch.dtype | None) -> str:
    return f"{name}_{SUFFIX[dtype]}" if dtype else name


@functools.cache
def _function(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    loaded = compiled()
    assert loaded is not None
    found = getattr(loaded, full_name(name, dtype))
    found.argtypes = [KINDS[letter] for letter in ARGUMENTS[name].replace(" ", "")]
    found.restype = None
    called: Callable[..., Any] = found
    return called


def serves(x_T: Tensor) -> bool:
    """Return whether the C functions support a packed tensor: small, on a CPU, of a supported dtype."""
    return x_T.shape[0] <= TOKENS and x_T.is_cpu and x_T.dtype in SUFFIX


def room(count: int, least: int) -> int:
    """Round up to a power of two, so that similar lengths can share buffers."""
    return max(least, 1 << (count - 1).bit_length())


def pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor, which must be contiguous."""
    return None if x is None else dense(x).data_ptr()


def strided(x: Tensor, inner: int) -> tuple[int, ...]:
    """Return a tensor's address and outer strides; the last `inner` dimensions must be contiguous."""
    return x.data_ptr(), *outer_strides(x, inner)


def path_width(group: Group) -> int:
    """Return the maximum length of a pending path."""
    return 0 if group.path is None else group.path.slab_BN.shape[1]


def has_room(group: Group) -> bool:
    """Return whether path and tentative window fit on a thread's stack."""
    is_tentative = group.record is not None or group.snapshot_BM is not None
    return path_width(group) <= MOST and not (is_tentative and group.width > MOST)


def ids(group: Group) -> tuple[int | None, ...]:
    """Return the path's ids, lengths and width and the records' or snapshots' ids, tensors as addresses."""
    path, records = group.path or (None, None), (*(group.record or (None, None)), group.snapshot_BM)
    return *map(pointer, (*path, group.path_length_B)), path_width(group), *map(pointer, records)


def records_of(memory: RecurrentMemory) -> int:
    """Return the address of the struct that describes the layer's records."""
    update, *update_strides = strided(memory.update_SRHW, 2)
    decay, *decay_strides = strided(memory.decay_SRH, memory.decay_SRH.ndim - 2)
    return ctypes.addressof(_records(update, decay, *update_strides, *decay_strides))


@functools.cache
def _records(*fields: int) -> Records:
    """Cache the struct: C holds its address."""
    return Records(*fields)
