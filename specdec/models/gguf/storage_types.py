"""The storage types of GGUF files, one row per type in `TYPES`: layout, decoders, and form in memory.

The decoders are the numpy reference of blocks.inc, which has the same ones by type id.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from specdec.models.gguf import codebooks as low
from specdec.models.gguf.bits import (
    EIGHT,
    FP4,
    GROUP,
    IQ4,
    SHIFTS,
    Array,
    Scales,
    each_bit,
    flat,
    four_chunks,
    half,
    nibble_pairs,
    nibbles,
    quarters,
)


class GgufType(NamedTuple):
    """Storage type of a tensor. A weight is (integer - middle) * scale, or integer * scale + offset."""

    name: str
    id: int
    """Type id in files."""
    block_size: int
    """Weights per block."""
    block_bytes: int
    read_integers: Callable[[Array], Array] | None = None
    """Decode the integers [B, N] of blocks, in 8 bits; None: plain floats."""
    read_scales: Callable[[Array], Scales] | None = None
    """Decode the scales, and the offsets if `offsets`."""
    bits: int | None = None
    """Bits per integer in memory, which choose the kernels that multiply them; None: widened at load."""
    group: int = GROUP
    """Weights per scale."""
    middle: int = 0
    """Middle of the range of unsigned integers; subtracted in memory, and offsets are adjusted for it."""
    offsets: bool = False
    half_scales: bool = False
    """True if scales are float16 as stored; others are products of two factors, or powers."""
    codebook: str | None = None

    @property
    def memory_format(self) -> tuple[int | None, int, bool]:
        """Return what matrices that are stacked must share: bits, group and offsets."""
        return self.bits, self.group, self.offsets

    @property
    def bits_per_weight(self) -> float:
        """Return bits per weight in memory, with its share of scales and offsets, if it stays integers."""
        assert self.bits
        return self.bits + (1 if self.offsets or self.group < GROUP else 0.5)

    @property
    def scale_dtype(self) -> str:
        """Return the dtype of scales, as safetensors spells it."""
        return "F16" if self.half_scales else "F32"

    @property
    def layout(self) -> tuple[int, ...]:
        """Return what the C kernel needs to know, in its order."""
        return (
            self.id,
            self.block_size,
            self.block_bytes,
            self.block_size // self.group,
            self.middle,
            int(self.offsets),
        )

    @property
    def vectors(self) -> Array | None:
        """Return the codebook, or None if the type has none."""
        return low.codebook(self.codebook) if self.codebook else None


def _nibbles_from(start: int) -> Callable[[Array], Array]:
    """Return a decoder of nibbles that follow some bytes."""
    return lambda block_BX: nibbles(block_BX[:, start:])


def _five_bits_from(start: int) -> Callable[[Array], Array]:
    """Return a decoder of 32 high bits that follow some bytes, and their nibbles."""
    return lambda block_BX: nibbles(block_BX[:, start + 4 :]) | each_bit(block_BX[:, start : start + 4]) << 4


def _q2_k(block_BX: Array) -> Array:
    return flat(quarters(block_BX[:, 16:80]))


def _q3_k(block_BX: Array) -> Array:
    is_high_B8N = block_BX[:, None, :32] >> EIGHT[:, None] & 1
    low_B8N = quarters(block_BX[:, 32:96]).reshape(-1, 8, GROUP)
    return flat(low_B8N | is_high_B8N << 2)


def _q4_k(block_BX: Array) -> Array:
    return flat(four_chunks(block_BX[:, 16:]))


def _q5_k(block_BX: Array) -> Array:
    high_B8N = (block_BX[:, None, 16:48] >> EIGHT[:, None] & 1) << 4
    return flat(four_chunks(block_BX[:, 48:]) | high_B8N)


def _q6_k(block_BX: Array) -> Array:
    low_B24N = nibbles(block_BX[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, GROUP)
    return flat(low_B24N | quarters(block_BX[:, 128:192]) << 4)


def _q8_0(block_BX: Array) -> Array:
    return block_BX[:, 2:]


def _tq2_0(block_BX: Array) -> Array:
    return flat(quarters(block_BX[:, :64]))


def _iq4_nl(block_BX: Array) -> Array:
    number_BN: Array = IQ4[nibbles(block_BX[:, 2:])]
    return number_BN


def _iq4_xs(block_BX: Array) -> Array:
    return flat(IQ4[nibbles(block_BX[:, 8:].reshape(-1, 8, 16))])


def _mxfp4(block_BX: Array) -> Array:
    number_BN: Array = FP4[nibbles(block_BX[:, 1:])]
    return number_BN


_one = low.block_scale(1)


def _pair(block_BX: Array) -> Scales:
    both_B2 = half(block_BX[:, :4])
    return both_B2[:, :1], both_B2[:, 1:]


def _k_scales(block_BX: Array) -> Scales:
    """Decode Q4_K's and Q5_K's scales and minimums, six bits each times the block's own."""
    first_B4, second_B4, third_B4 = (block_BX[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    scale_B8 = np.concatenate([first_B4 & 63, third_B4 & 15 | first_B4 >> 6 << 4], axis=1)
    least_B8 = np.concatenate([second_B4 & 63, third_B4 >> 4 | second_B4 >> 6 << 4], axis=1)
    both_B2 = half(block_BX[:, :4])
    return both_B2[:, :1] * scale_B8, -both_B2[:, 1:] * least_B8


def _q2_k_scales(block_BX: Array) -> Scales:
    """Decode scales and minimums, four bits each times the block's own."""
    both_BG, block_B2 = block_BX[:, :16], half(block_BX[:, 80:])
    return block_B2[:, :1] * (both_BG & 15), -block_B2[:, 1:] * (both_BG >> 4)


def _q3_k_scales(block_BX: Array) -> Scales:
    high_BG = flat(block_BX[:, None, 104:108] >> SHIFTS[:, None] & 3)
    scale_BG = (nibbles(block_BX[:, 96:104]) | high_BG << 4).view(np.int8) - np.int8(32)
    return scale_BG * half(block_BX[:, 108:]), None


def _q6_k_scales(block_BX: Array) -> Scales:
    return block_BX[:, 192:208].view(np.int8) * half(block_BX[:, 208:]), None


def _iq4_xs_scales(block_BX: Array) -> Scales:
    low_B8 = nibble_pairs(block_BX[:, 4:8])
    high_B8 = flat(block_BX[:, 2:4, None] >> SHIFTS & 3)
    return ((low_B8 | high_B8 << 4).view(np.int8) - np.int8(32)) * half(block_BX[:, :2]), None


def _mxfp4_scales(block_BX: Array) -> Scales:
    """Return 2^(byte - 128), computed through float32 bits."""
    byte_B1 = block_BX[:, :1].astype(np.int32)
    return np.where(byte_B1 < 2, 0x200000 << np.minimum(byte_B1, 1), byte_B1 - 1 << 23).view(np.float32), None


_ROWS = (
    GgufType("F32", 0, 1, 4),
    GgufType("F16", 1, 1, 2),
    GgufType("BF16", 30, 1, 2),
    GgufType("Q4_0", 2, 32, 18, _nibbles_from(2), _one, 4, middle=8, half_scales=True),
    GgufType("Q4_1", 3, 32, 20, _nibbles_from(4), _pair, 4, middle=8, offsets=True, half_scales=True),
    GgufType("Q5_0", 6, 32, 22, _five_bits_from(2), _one, 6, middle=16, half_scales=True),
    GgufType("Q5_1", 7, 32, 24, _five_bits_from(4), _pair, 6, middle=16, offsets=True, half_scales=True),
    GgufType("Q8_0", 8, 32, 34, _q8_0, _one, 8, half_scales=True),
    GgufType("IQ4_NL", 20, 32, 18, _iq4_nl, _one, 8, half_scales=True),
    GgufType("IQ4_XS", 23, 256, 136, _iq4_xs, _iq4_xs_scales, 8),
    GgufType("MXFP4", 39, 32, 17, _mxfp4, _mxfp4_scales, 6),
    GgufType("Q2_K", 10, 256, 84, _q2_k, _q2_k_scales, group=16, offsets=True),
    GgufType("Q3_K", 11, 256, 110, _q3_k, _q3_k_scales, 4, group=16, middle=4),
    GgufType("Q4_K", 12, 256, 144, _q4_k, _k_scales, 4, middle=8, offsets=True),
    GgufType("Q5_K", 13, 256, 176, _q5_k, _k_scales, 6, middle=16, offsets=True),
    GgufType("Q6_K", 14, 256, 210, _q6_k, _q6_k_scales, 6, group=16, middle=32),
    GgufType("IQ2_XXS", 16, 256, 66, low.iq2_xxs, low.iq2_xxs_scales, 8, codebook="IQ2_XXS"),
    GgufType("IQ2_XS", 17, 256, 74, low.iq2_xs, low.iq2_scales, 8, group=16, codebook="IQ2_XS"),
    GgufType("IQ2_S", 22, 256, 82, low.iq2_s, low.iq2_scales, 8, group=16, codebook="IQ2_S"),
    GgufType("IQ3_XXS", 18, 256, 98, low.iq3_xxs, low.iq3_xxs_scales, 8, codebook="IQ3_XXS"),
    GgufType("IQ3_S", 21, 256, 110, low.iq3_s, low.iq3_s_scales, 6, codebook="IQ3_S"),
    GgufType(
        "IQ1_S",
        19,
        256,
        50,
        low.iq1_s,
        low.iq1_s_scales,
        4,
        middle=1,
        offsets=True,
        codebook="IQ1",
    ),
    GgufType("IQ1_M", 29, 256, 56, low.iq1_m, low.iq1_m_scales, 6, group=16, codebook="IQ1"),
    GgufType("TQ1_0", 34, 256, 54, low.tq1_0, low.block_scale(8, 52), 4, middle=1, half_scales=True),
    GgufType("TQ2_0", 35, 256, 66, _tq2_0, low.block_scale(8, 64), 4, middle=1, half_scales=True),
    GgufType("NVFP4", 40, 64, 36, low.nvfp4, low.nvfp4_scales, 6, group=16),
    GgufType("Q1_0", 41, 128, 18, low.q1_0, low.block_scale(4), 4, half_scales=True),
    GgufType("Q2_0", 42, 64, 18, low.q2_0, low.block_scale(2), 4, middle=1, half_scales=True),
)
TYPES: Mapping[int, GgufType] = {row.id: row for row in _ROWS}
"""Types by their id in files."""
INTEGER_TYPES: Mapping[str, GgufType] = {row.name: row for row in _ROWS if row.bits}
"""Types that stay integers in memory, by name."""
UNREAD = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
"""Names of unsupported types."""
