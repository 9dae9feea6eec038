"""Quantised blocks: widened to float32 exactly as llama.cpp defines each type, or unpacked to integers.

In C, or without a compiler in numpy, which the C kernel is tested against.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.native.blocks import unpack
from specdec.kernels.native.instruction_sets import c_kernels
from specdec.models.gguf import codebooks
from specdec.models.gguf.bits import (
    EIGHT,
    FP4,
    GROUP,
    IQ4,
    SHIFTS,
    Array,
    each_bit,
    flat,
    four_chunks,
    half,
    nibble_pairs,
    nibbles,
    quarters,
)
from specdec.models.gguf.codebooks import codebook
from specdec.models.gguf.file import GgufType

PIECE = 1 << 18
"""Bytes per step, which fit in a core's cache."""

ROUNDED = 1 << 24
"""Numbers that are rounded together: they take 64 MB in float32, and a vocabulary's matrix 5 GB."""


class IntegerFormat(NamedTuple):
    """Integer format of a type."""

    bits: int
    group: int = GROUP
    """Weights per scale."""
    middle: int = 0
    """Subtracted from unsigned integers, whose groups have offsets; 0: signed without offsets."""


FLAT = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""Types whose groups share their block's float16 scale."""
KEPT: Mapping[str, IntegerFormat] = {
    "Q8_0": IntegerFormat(8),
    "Q5_0": IntegerFormat(6),
    "Q4_0": IntegerFormat(4),
    "Q4_1": IntegerFormat(4, middle=8),
    "Q5_1": IntegerFormat(6, middle=16),
    "Q4_K": IntegerFormat(4, middle=8),
    "Q5_K": IntegerFormat(6, middle=16),
    "Q6_K": IntegerFormat(6, group=16),
    "Q3_K": IntegerFormat(4, group=16),
    "IQ4_NL": IntegerFormat(8),
    "IQ4_XS": IntegerFormat(8),
    "MXFP4": IntegerFormat(6),
    "NVFP4": IntegerFormat(6, group=16),
    "IQ1_S": IntegerFormat(4, middle=1),
    "IQ1_M": IntegerFormat(6, group=16),
    "IQ2_XXS": IntegerFormat(8),
    "IQ2_XS": IntegerFormat(8, group=16),
    "IQ2_S": IntegerFormat(8, group=16),
    "IQ3_XXS": IntegerFormat(8),
    "IQ3_S": IntegerFormat(6),
    **dict.fromkeys(FLAT, IntegerFormat(4)),
}
"""Types that stay integers."""
_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits_per_weight(form: IntegerFormat | None) -> float:
    """Return bits per weight in memory, with its share of scales and offsets; None: widened."""
    return form.bits + (1 if form.middle or form.group < GROUP else 0.5) if form else 16


def widen(
    data_X: Array, kind: GgufType, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantise a tensor's bytes to float32, and round a piece at a time to another dtype."""
    out_X, each = torch.empty(shape, dtype=dtype), max(ROUNDED // kind.numbers, 1)
    block_BX, out_BN = data_X.reshape(-1, kind.bytes), out_X.view(-1, kind.numbers)
    for first in range(0, len(block_BX), each):
        piece_X = block_BX[first : first + each].reshape(-1)
        out_P = out_BN[first : first + each].view(-1)
        if kind.name in _WIDE:
            out_P.copy_(torch.from_numpy(piece_X.copy()).view(_WIDE[kind.name]))
        elif dtype == torch.float32:
            _fill("wide", piece_X, kind, out_P)
        else:
            out_P.copy_(_fill("wide", piece_X, kind, torch.empty(len(out_P))))
    return out_X


def integers(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of a type in `KEPT` as int8, minus the middle of their range."""
    return _fill("number", data_X, kind, torch.empty(shape, dtype=torch.int8))


def scales(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the integers' scales [N, groups], in the dtype of `scale_type`."""
    scale_NG = _fill("scale", data_X, kind, torch.empty(shape[0], shape[1] // KEPT[kind.name].group))
    return scale_NG.half() if scale_type(kind) == "F16" else scale_NG


def scale_type(kind: GgufType) -> str:
    """Return F16 for scales stored as float16, F32 for products of two factors and for powers."""
    is_stored = kind.numbers == GROUP and kind.name != "MXFP4"
    return "F16" if is_stored or kind.name in FLAT else "F32"


def offsets(data_X: Array, kind: GgufType, shape: tuple[int, ...]) -> Tensor:
    """Return the offsets of integers times scales, in float32 [N, groups]."""
    return _fill("offset", data_X, kind, torch.empty(shape[0], shape[1] // KEPT[kind.name].group))


def _fill(part: str, data_X: Array, kind: GgufType, out_X: Tensor) -> Tensor:
    """Unpack one part of all blocks in C, or in numpy without a compiler."""
    block_BX = data_X.reshape(-1, kind.bytes)
    if c_kernels():
        each = {"number": kind.numbers, "wide": kind.numbers}.get(part) or kind.numbers // KEPT[
            kind.name
        ].group
        assert out_X.numel() == len(block_BX) * each
        unpack(data_X, kind.number, len(block_BX), part, out_X, codebook(kind.name))
        return out_X
    return fill_in_numpy(part, block_BX, kind, out_X)


def fill_in_numpy(part: str, block_BX: Array, kind: GgufType, out_X: Tensor) -> Tensor:
    """Unpack one part of blocks, a cacheful at a time: the reference for blocks.inc."""
    read, out_BN, together = _PARTS[part], out_X.numpy().reshape(len(block_BX), -1), PIECE // kind.bytes
    with np.errstate(all="ignore"):  # NaN and Inf in damaged files
        for first in range(0, len(block_BX), together):
            out_BN[first : first + together] = read(block_BX[first : first + together], kind)
    return out_X


def _widen(block_BX: Array, kind: GgufType) -> Array:
    scale_BG, offset_BG = _SCALES[kind.name](block_BX)
    number_BGN = _NUMBERS[kind.name](block_BX).reshape(*scale_BG.shape, -1)
    wide_BGN = number_BGN * scale_BG[..., None]
    return (wide_BGN if offset_BG is None else wide_BGN + offset_BG[..., None]).reshape(len(block_BX), -1)


def _centred(block_BX: Array, kind: GgufType) -> Array:
    number_BN = _NUMBERS[kind.name](block_BX).view(np.int8)
    middle = KEPT[kind.name].middle
    return number_BN - np.int8(middle) if middle else number_BN


def _scales(block_BX: Array, kind: GgufType) -> Array:
    return _SCALES[kind.name](block_BX)[0]


def _offsets(block_BX: Array, kind: GgufType) -> Array:
    """Return offsets relative to the middle of the integers' range."""
    scale_BG, offset_BG = _SCALES[kind.name](block_BX)
    assert offset_BG is not None
    from_middle_BG: Array = offset_BG + KEPT[kind.name].middle * scale_BG
    return from_middle_BG


_PARTS: Mapping[str, Callable[[Array, GgufType], Array]] = {
    **{"wide": _widen, "number": _centred, "scale": _scales, "offset": _offsets},
}


def _q3_k(block_BX: Array) -> Array:
    is_high_B8N = block_BX[:, None, :32] >> EIGHT[:, None] & 1
    low_B8N = quarters(block_BX[:, 32:96]).reshape(-1, 8, GROUP)
    return flat(low_B8N | is_high_B8N << 2).view(np.int8) - np.int8(4)


def _q5_k(block_BX: Array) -> Array:
    high_B8N = (block_BX[:, None, 16:48] >> EIGHT[:, None] & 1) << 4
    return flat(four_chunks(block_BX[:, 48:]) | high_B8N)


def _q6_k(block_BX: Array) -> Array:
    low_B24N = nibbles(block_BX[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, GROUP)
    return flat(low_B24N | quarters(block_BX[:, 128:192]) << 4).view(np.int8) - np.int8(32)


_NUMBERS: Mapping[str, Callable[[Array], Array]] = {
    **codebooks.NUMBERS,
    "Q8_0": lambda block_BX: block_BX[:, 2:].view(np.int8),
    "Q5_0": lambda block_BX: (
        (nibbles(block_BX[:, 6:]) | each_bit(block_BX[:, 2:6]) << 4).view(np.int8) - np.int8(16)
    ),
    "Q4_0": lambda block_BX: nibbles(block_BX[:, 2:]).view(np.int8) - np.int8(8),
    "Q4_1": lambda block_BX: nibbles(block_BX[:, 4:]),
    "Q5_1": lambda block_BX: nibbles(block_BX[:, 8:]) | each_bit(block_BX[:, 4:8]) << 4,
    "Q4_K": lambda block_BX: flat(four_chunks(block_BX[:, 16:])),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": lambda block_BX: flat(quarters(block_BX[:, 16:80])),
    "Q3_K": _q3_k,
    "IQ4_NL": lambda block_BX: IQ4[nibbles(block_BX[:, 2:])],
    "IQ4_XS": lambda block_BX: flat(IQ4[nibbles(block_BX[:, 8:].reshape(-1, 8, 16))]),
    "MXFP4": lambda block_BX: FP4[nibbles(block_BX[:, 1:])],
}
"""The integers [B, N] of blocks: int8 if signed, uint8 if unsigned."""


def _one(block_BX: Array) -> tuple[Array, None]:
    return half(block_BX[:, :2]), None


def _two(block_BX: Array) -> tuple[Array, Array]:
    own_B2 = half(block_BX[:, :4])
    return own_B2[:, :1], own_B2[:, 1:]


def _eight(block_BX: Array) -> tuple[Array, Array]:
    """Return each group's scale and minimum, six bits each times the block's own."""
    first_B4, second_B4, third_B4 = (block_BX[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale_B8 = np.concatenate([first_B4 & 63, third_B4 & 15 | first_B4 >> 6 << 4], axis=1)
    least_B8 = np.concatenate([second_B4 & 63, third_B4 >> 4 | second_B4 >> 6 << 4], axis=1)
    own_B2 = half(block_BX[:, :4])
    return own_B2[:, :1] * scale_B8, -own_B2[:, 1:] * least_B8


def _sixteen(block_BX: Array) -> tuple[Array, None]:
    return block_BX[:, 192:208].view(np.int8) * half(block_BX[:, 208:]), None


def _sixteen_pairs(block_BX: Array) -> tuple[Array, Array]:
    """Return each group's scale and minimum, four bits each times the block's own."""
    both_BG, own_B2 = block_BX[:, :16], half(block_BX[:, 80:])
    return own_B2[:, :1] * (both_BG & 15), -own_B2[:, 1:] * (both_BG >> 4)


def _sixteen_of_six_bits(block_BX: Array) -> tuple[Array, None]:
    high_BG = flat(block_BX[:, None, 104:108] >> SHIFTS[:, None] & 3)
    scale_BG = (nibbles(block_BX[:, 96:104]) | high_BG << 4).view(np.int8) - np.int8(32)
    return scale_BG * half(block_BX[:, 108:]), None


def _eight_of_six_bits(block_BX: Array) -> tuple[Array, None]:
    low_B8 = nibble_pairs(block_BX[:, 4:8])
    high_B8 = flat(block_BX[:, 2:4, None] >> SHIFTS & 3)
    return ((low_B8 | high_B8 << 4).view(np.int8) - np.int8(32)) * half(block_BX[:, :2]), None


def _power(block_BX: Array) -> tuple[Array, None]:
    """Return 2^(byte - 128), computed through float32 bits."""
    byte_B1 = block_BX[:, :1].astype(np.int32)
    return np.where(byte_B1 < 2, 0x200000 << np.minimum(byte_B1, 1), byte_B1 - 1 << 23).view(np.float32), None


_SCALES: Mapping[str, Callable[[Array], tuple[Array, Array | None]]] = {
    **codebooks.SCALES,
    **dict.fromkeys(("Q8_0", "Q5_0", "Q4_0", "IQ4_NL"), _one),
    **dict.fromkeys(("Q4_1", "Q5_1"), _two),
    **dict.fromkeys(("Q4_K", "Q5_K"), _eight),
    "Q6_K": _sixteen,
    "Q2_K": _sixteen_pairs,
    "Q3_K": _sixteen_of_six_bits,
    "IQ4_XS": _eight_of_six_bits,
    "MXFP4": _power,
}
"""The scales [B, G] of blocks, and the offsets of types that have them."""
