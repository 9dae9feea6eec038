"""Blocks unpacked in C equal numpy's bit for bit; test_gguf.py compares numbers with the package gguf."""

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.native.blocks import unpack
from specdec.kernels.native.compiled import compiled
from specdec.kernels.native.threads import without_helpers
from specdec.models.gguf import blocks
from specdec.models.gguf.blocks import fill_in_numpy
from specdec.models.gguf.storage_types import TYPES, GgufType
from tests.selection import EXHAUSTIVE

in_c = pytest.mark.skipif(compiled() is None, reason="there is no C compiler")
BLOCKS = [kind for kind in TYPES.values() if kind.block_size > 1]
PARTS = [
    (kind, part)
    for kind in BLOCKS
    for part in ("wide", "number", "scale", "offset")
    if part == "wide" or (kind.bits and (part != "offset" or kind.offsets))
]
GUARD = 64


def empty(kind: GgufType, part: str, count: int) -> Tensor:
    """Return a buffer for a part, between guards that must stay unchanged."""
    each = kind.block_size if part in ("wide", "number") else kind.block_size // kind.group
    dtype = torch.int8 if part == "number" else torch.float32
    return torch.full((2 * GUARD + count * each,), 77, dtype=dtype)


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of numbers, with one pattern for all NaN."""
    return x if x.dtype == torch.int8 else x.where(x == x, torch.nan).view(torch.int32)


@in_c
@pytest.mark.parametrize("count", [1, 63, 65, 1025, pytest.param(20_001, marks=EXHAUSTIVE)])
@pytest.mark.parametrize(("kind", "part"), PARTS, ids=[f"{kind.name}-{part}" for kind, part in PARTS])
def test_blocks_are_unpacked_to_the_same_bits(kind: GgufType, part: str, count: int) -> None:
    """Random bytes include NaN, Inf and subnormals; nothing is written outside, and no warning is raised."""
    data = np.random.default_rng(count).integers(0, 256, count * kind.block_bytes, dtype=np.uint8)
    found, expected = (empty(kind, part, count) for _ in range(2))
    with without_helpers():
        unpack(data, kind.layout, count, part, found[GUARD:-GUARD], kind.vectors)
    with warnings.catch_warnings(action="error"):
        fill_in_numpy(part, data.reshape(count, -1), kind, expected[GUARD:-GUARD])
    assert torch.equal(bits_of(found), bits_of(expected))
    assert not (expected[GUARD:-GUARD] == 77).all()


@in_c
@pytest.mark.parametrize("kind", BLOCKS, ids=[kind.name for kind in BLOCKS])
def test_every_byte_of_a_block_counts(kind: GgufType) -> None:
    """Control: in random blocks, a changed bit anywhere changes a number."""
    data_BX = np.random.default_rng(0).integers(0, 256, (20, kind.block_bytes), dtype=np.uint8)
    book = kind.vectors
    plain, found = (empty(kind, "wide", 20) for _ in range(2))
    unpack(data_BX, kind.layout, 20, "wide", plain[GUARD:-GUARD], book)
    for at in range(kind.block_bytes):
        other_BX = data_BX.copy()
        other_BX[:, at] ^= 2
        unpack(other_BX, kind.layout, 20, "wide", found[GUARD:-GUARD], book)
        assert not torch.equal(bits_of(found), bits_of(plain)), at


@pytest.mark.parametrize("kind", BLOCKS, ids=[kind.name for kind in BLOCKS])
def test_without_a_compiler_blocks_are_the_same(kind: GgufType, monkeypatch: pytest.MonkeyPatch) -> None:
    data, shape = (
        np.random.default_rng(0).integers(0, 124, 6 * kind.block_bytes, dtype=np.uint8),
        (3, 2 * kind.block_size),
    )
    reads = [blocks.widen, *([blocks.integers, blocks.scales] if kind.bits else [])]
    found = [read(data, kind, shape) for read in reads]
    monkeypatch.setattr(blocks, "c_kernels", lambda: None)
    monkeypatch.setattr(blocks, "unpack", None)
    for own, read in zip(found, reads, strict=True):
        assert torch.equal(own, read(data, kind, shape))
