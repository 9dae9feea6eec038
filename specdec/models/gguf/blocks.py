"""Quantised blocks: widened to float32 exactly as llama.cpp defines each type, or unpacked to integers.

In C, or without a compiler in numpy, which the C kernel is tested against.
"""

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.native.blocks import unpack
from specdec.kernels.native.instruction_sets import c_kernels
from specdec.models.gguf.bits import Array, flat
from specdec.models.gguf.storage_types import GgufType

PIECE = 1 << 18
"""Bytes per step, which fit in a core's cache."""

ROUNDED = 1 << 24
"""Numbers that are rounded together: they take 64 MB in float32, and a vocabulary's matrix 5 GB."""


_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def widen(
    data_X: Array,
    kind: GgufType,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    factor: float = 1.0,
) -> Tensor:
    """Dequantise a tensor's bytes times `factor` to float32, and round a piece at a time to another dtype."""
    out_X, each = torch.empty(shape, dtype=dtype), max(ROUNDED // kind.block_size, 1)
    block_BX, out_BN = data_X.reshape(-1, kind.block_bytes), out_X.view(-1, kind.block_size)
    for first in range(0, len(block_BX), each):
        piece_X = block_BX[first : first + each].reshape(-1)
        out_P = out_BN[first : first + each].view(-1)
        if kind.name in _WIDE:
            stored_P = torch.from_numpy(piece_X.copy()).view(_WIDE[kind.name])
            out_P.copy_(stored_P if factor == 1 else stored_P.float() * factor)
            continue
        wide_P = out_P if dtype == torch.float32 else torch.empty(len(out_P))
        _fill("wide", piece_X, kind, wide_P)
        if factor != 1:
            wide_P *= factor
        if wide_P is not out_P:
            out_P.copy_(wide_P)
    return out_X


def integers(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of a type that has `bits` as int8, minus the middle of their range."""
    return _fill("number", data_X, kind, torch.empty(shape, dtype=torch.int8))


def scales(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the integers' scales [N, groups], in the type's `scale_dtype`."""
    scale_NG = _fill("scale", data_X, kind, torch.empty(shape[0], shape[1] // kind.group))
    return scale_NG.half() if kind.half_scales else scale_NG


def offsets(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the offsets of integers times scales, in float32 [N, groups]."""
    return _fill("offset", data_X, kind, torch.empty(shape[0], shape[1] // kind.group))


def _fill(part: str, data_X: Array, kind: GgufType, out_X: Tensor) -> Tensor:
    """Unpack one part of all blocks in C, or in numpy without a compiler."""
    block_BX = data_X.reshape(-1, kind.block_bytes)
    if not c_kernels():
        return fill_in_numpy(part, block_BX, kind, out_X)
    each = kind.block_size if part in ("number", "wide") else kind.block_size // kind.group
    assert out_X.numel() == len(block_BX) * each
    unpack(data_X, kind.layout, len(block_BX), part, out_X, kind.vectors)
    return out_X


def fill_in_numpy(part: str, block_BX: Array, kind: GgufType, out_X: Tensor) -> Tensor:
    """Unpack one part of blocks, a cacheful at a time: the reference for blocks.inc."""
    out_BN, together = out_X.numpy().reshape(len(block_BX), -1), PIECE // kind.block_bytes
    with np.errstate(all="ignore"):  # NaN and Inf in damaged files
        for first in range(0, len(block_BX), together):
            out_BN[first : first + together] = _part(part, block_BX[first : first + together], kind)
    return out_X


def _part(part: str, block_BX: Array, kind: GgufType) -> Array:
    assert kind.read_integers and kind.read_scales
    if part == "number":
        return kind.read_integers(block_BX).view(np.int8) - np.int8(kind.middle)
    scale_BG, offset_BG = kind.read_scales(block_BX)
    if part == "scale":
        return scale_BG
    if part == "offset":
        assert offset_BG is not None
        centred_BG: Array = offset_BG + kind.middle * scale_BG
        return centred_BG
    number_BN = kind.read_integers(block_BX).view(np.int8)
    if offset_BG is None:
        number_BN = number_BN - np.int8(kind.middle)
    wide_BGN = number_BN.reshape(*scale_BG.shape, -1) * scale_BG[..., None]
    return flat(wide_BGN if offset_BG is None else wide_BGN + offset_BG[..., None])
