"""Small arenas of known bytes, and descriptor rows between two of equal layouts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.reach.carrier import Indices
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout, StateShape

LAYOUT = Layout(
    kv=(KVShape(heads=2, dim=4),),
    states=(StateShape(heads=2, key_dim=16, value_dim=24, conv_inputs=3, channels=40),),
    dtype=torch.float32,
)
SLABS = 24


def arena(seed: int | None = None, layout: Layout = LAYOUT, slabs: int = SLABS) -> Arena:
    """Return an arena of random bytes, or of zeros without a seed."""
    made = Arena(layout, slabs * layout.slab_bytes, torch.device("cpu"))
    made.data.zero_()
    if seed is not None:
        made.data.random_(1, 256, generator=torch.Generator().manual_seed(seed))
    return made


@dataclass(frozen=True, slots=True)
class WholeSlots:
    """A plan between two arenas of one layout: one row for the blocks, one for the states."""

    local: NDArray[np.int64]
    remote: NDArray[np.int64]

    @classmethod
    def between(cls, here: Arena, base: int) -> "WholeSlots":
        return cls(rows(here, here.data.data_ptr()), rows(here, base))


def rows(arena: Arena, base: int) -> NDArray[np.int64]:
    layout, size = arena.layout, arena.data.nbytes
    block, state, slab = layout.block_bytes, layout.state_bytes, layout.slab_bytes
    return np.array(
        [(base, block, 0, block, size // block), (base, state, 0, slab, size // slab)], dtype=np.int64
    )


def pick(arena: Arena, here: list[int], there: list[int], states: tuple[int, int] | None = None) -> Indices:
    """Return the paired indices of blocks, and of a state."""
    num_blocks = arena.data.nbytes // arena.layout.block_bytes
    if states is not None:
        here, there = [*here, num_blocks + states[0]], [*there, num_blocks + states[1]]
    return np.array(here, dtype=np.int32), np.array(there, dtype=np.int32)


def num_bytes(arena: Arena, blocks: int, states: int = 0) -> int:
    return blocks * arena.layout.block_bytes + states * arena.layout.state_bytes


def until(happens: Callable[[], bool]) -> None:
    """Poll until another thread makes a condition true."""
    limit_s = time.monotonic() + 60.0
    while not happens():
        assert time.monotonic() < limit_s
        time.sleep(0.001)
