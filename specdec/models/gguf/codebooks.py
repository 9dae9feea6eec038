"""Decode blocks of one to three bits per weight and NVFP4: signs, ternary digits, codebook indices.

A codebook lists vectors of four or eight weights. This is the numpy implementation; blocks.inc is the C one.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specdec.models.gguf.bits import (
    FP4,
    SHIFTS,
    Array,
    Scales,
    each_bit,
    flat,
    half,
    nibble_pairs,
    nibbles,
    words,
)

_BOOKS = Path(__file__).parents[2] / "assets" / "gguf" / "codebooks.npz"
_THREES = 3 * np.arange(4, dtype=np.uint16)
_SEVENS = 7 * np.arange(4, dtype=np.uint32)
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)
_EVEN = np.array([i | i.bit_count() % 2 << 7 for i in range(128)], np.uint8)
"""Sign bits of eight weights with even parity, by the first seven."""


@functools.cache
def codebook(name: str) -> Array:
    """Return a codebook's vectors in int8."""
    with np.load(_BOOKS) as books:
        found: Array = books[name]
    return found


def _look_up(name: str, index_BI: Array, sign_BX: Array | None = None) -> Array:
    """Return the codebook's weights, negated where the sign bits are set."""
    number_BN: Array = flat(codebook(name)[index_BI])
    return number_BN if sign_BX is None else np.where(each_bit(sign_BX), -number_BN, number_BN)


def _even_signs(word_B8: Array) -> Array:
    """Return the signs of 32 weights per word, from its lower 28 bits."""
    return flat(_EVEN[word_B8[..., None] >> _SEVENS & 127])


def _pairs_of_words(block_BX: Array) -> Array:
    """Return IQ2_XXS's words of signs and scales, which follow its indices."""
    return words(block_BX[:, 2:], np.uint32)[:, 1::2]


def iq2_xxs(block_BX: Array) -> Array:
    index_BI = flat(block_BX[:, 2:].reshape(-1, 8, 8)[:, :, :4])
    return _look_up("IQ2_XXS", index_BI, _even_signs(_pairs_of_words(block_BX)))


def iq2_xs(block_BX: Array) -> Array:
    word_BI = words(block_BX[:, 2:66], np.uint16)
    return _look_up("IQ2_XS", word_BI & 511, _EVEN[word_BI >> 9])


def iq2_s(block_BX: Array) -> Array:
    high_BI = flat(block_BX[:, 66:74, None] >> SHIFTS & 3).astype(np.uint16)
    return _look_up("IQ2_S", block_BX[:, 2:34] | high_BI << 8, block_BX[:, 34:66])


def iq3_xxs(block_BX: Array) -> Array:
    return _look_up("IQ3_XXS", block_BX[:, 2:66], _even_signs(words(block_BX[:, 66:], np.uint32)))


def iq3_s(block_BX: Array) -> Array:
    high_BI = each_bit(block_BX[:, 66:74]).astype(np.uint16)
    return _look_up("IQ3_S", block_BX[:, 2:66] | high_BI << 8, block_BX[:, 74:106])


def iq1_s(block_BX: Array) -> Array:
    """Return ternary digits counted from the lowest."""
    high_BI = flat(words(block_BX[:, 34:], np.uint16)[..., None] >> _THREES & 7)
    return _look_up("IQ1", block_BX[:, 2:34] | high_BI << 8) + np.int8(1)


def iq1_m(block_BX: Array) -> Array:
    """Return weights in eighths: ternary digits plus or minus one eighth."""
    nibble_BI = nibble_pairs(block_BX[:, 32:48]).astype(np.uint16)
    digit_BIN = _look_up("IQ1", block_BX[:, :32] | (nibble_BI & 7) << 8).reshape(len(block_BX), 32, 8)
    more_BI = np.where(nibble_BI & 8, np.int8(-1), np.int8(1))
    return flat(8 * digit_BIN + more_BI[..., None])


def tq1_0(block_BX: Array) -> Array:
    """Return base-3 digits, five per byte: a fraction of 256 with the most significant digit first."""
    parts = (block_BX[:, :32], _POWERS), (block_BX[:, 32:48], _POWERS), (block_BX[:, 48:52], _POWERS[:4])
    rest_BN = np.concatenate([flat(own_BX[:, None] * power[:, None]) for own_BX, power in parts], axis=1)
    return (rest_BN.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def q1_0(block_BX: Array) -> Array:
    return 2 * each_bit(block_BX[:, 2:]).view(np.int8) - np.int8(1)


def q2_0(block_BX: Array) -> Array:
    return flat(block_BX[:, 2:, None] >> SHIFTS & 3)


def nvfp4(block_BX: Array) -> Array:
    return flat(FP4[nibbles(block_BX[:, 4:].reshape(-1, 4, 8))])


def _word_scales(word_B8: Array, block_BX: Array, unit: float) -> Scales:
    scale_B8 = half(block_BX[:, :2]) * (np.float32(0.5) + (word_B8 >> 28).astype(np.float32))
    return scale_B8 * np.float32(unit), None


def iq2_scales(block_BX: Array) -> Scales:
    """Return each group's scale from four bits: an odd multiple of an eighth of the block's own."""
    odd_BG = np.float32(0.5) + nibble_pairs(block_BX[:, -8:])
    return half(block_BX[:, :2]) * odd_BG * np.float32(0.25), None


def iq1_s_scales(block_BX: Array) -> Scales:
    """Return scales, and offsets relative to the lowest digit."""
    word_B8 = words(block_BX[:, 34:], np.uint16)
    scale_B8 = half(block_BX[:, :2]) * (2 * (word_B8 >> 12 & 7) + 1)
    more_B8 = np.where(word_B8 >> 15, np.float32(-1.125), np.float32(-0.875))
    return scale_B8, scale_B8 * more_B8


def iq1_m_scales(block_BX: Array) -> Scales:
    """Return scales in eighths; the block's own is in the upper bits of four words."""
    word_B4 = words(block_BX[:, 48:], np.uint16)
    own_B1 = half((word_B4 >> 12 << 4 * np.arange(4, dtype=np.uint16)).sum(axis=1, dtype=np.uint16)[:, None])
    return own_B1 * flat(2 * (word_B4[..., None] >> _THREES & 7) + 1) * np.float32(0.125), None


def nvfp4_scales(block_BX: Array) -> Scales:
    """Return half of unsigned 8-bit floats, where 127 means 0."""
    exponent_B4, rest_B4 = (block_BX[:, :4] >> 3 & 15).astype(np.int32), block_BX[:, :4] & 7
    fraction_B4 = np.where(exponent_B4, 8 + rest_B4, rest_B4).astype(np.float32)
    scale_B4 = np.ldexp(fraction_B4, np.maximum(exponent_B4, 1) - 11)
    return np.where(block_BX[:, :4] == 0x7F, np.float32(0), scale_B4), None


def block_scale(groups: int, at: int = 0) -> Callable[[Array], Scales]:
    """Return a function that repeats a block's scale, which is at a byte offset, for each of its groups."""
    return lambda block_BX: (np.repeat(half(block_BX[:, at : at + 2]), groups, axis=1), None)


def iq2_xxs_scales(block_BX: Array) -> Scales:
    return _word_scales(_pairs_of_words(block_BX), block_BX, 0.25)


def iq3_xxs_scales(block_BX: Array) -> Scales:
    return _word_scales(words(block_BX[:, 66:], np.uint32), block_BX, 0.5)


def iq3_s_scales(block_BX: Array) -> Scales:
    return half(block_BX[:, :2]) * (2 * nibble_pairs(block_BX[:, 106:]) + 1), None
