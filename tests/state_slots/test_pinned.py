"""Host memory is pinned in exactly the requested size."""

import gc

import pytest
import torch

from specdec.errors import CapacityError
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout

CPU = torch.device("cpu")
LAYOUT = Layout((KVShape(2, 8),), (), torch.float32, torch.float32)


class Runtime:
    """A stand-in for the CUDA runtime that records the locked bytes."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int:
        assert flags == 0
        if not self.error:
            self.locked[pointer] = size
        return self.error

    def cudaHostUnregister(self, pointer: int, /) -> int:
        del self.locked[pointer]
        return 0


def test_no_more_is_pinned_than_requested() -> None:
    runtime, size = Runtime(), 5 * LAYOUT.slab_bytes
    arena = Arena(LAYOUT, size + 1, CPU, pinned=True, runtime=runtime)
    assert runtime.locked == {arena.data.data_ptr(): size}
    assert size & (size - 1), "a power of two would show nothing"


def test_pages_are_unlocked_before_they_are_given_back() -> None:
    runtime = Runtime()
    arena = Arena(LAYOUT, 3 * LAYOUT.slab_bytes, CPU, pinned=True, runtime=runtime)
    del arena
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_pinned_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"cannot be pinned \(CUDA error 2\); give less") as refused:
        Arena(LAYOUT, 3 * LAYOUT.slab_bytes, CPU, pinned=True, runtime=Runtime(2))
    assert refused.value.field == "memory_bytes"


def test_memory_that_no_gpu_copies_is_left_alone() -> None:
    runtime = Runtime()
    Arena(LAYOUT, 3 * LAYOUT.slab_bytes, CPU, runtime=runtime)
    assert not runtime.locked
