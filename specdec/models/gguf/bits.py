"""Bit fields of blocks as numpy arrays; blocks are the first dimension."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Scales = tuple[Array, Array | None]
"""Scales [B, G] of blocks, and the offsets of types that have them."""
GROUP = 32
"""Weights per scale in most types, including Q4_K and Q5_K."""
EIGHT = np.arange(8, dtype=np.uint8)
SHIFTS = 2 * np.arange(4, dtype=np.uint8)
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Values of FP4, doubled."""


def half(block_BX: Array) -> Array:
    """Convert pairs of bytes from float16."""
    return np.ascontiguousarray(block_BX).view(np.float16).astype(np.float32)


def words(block_BX: Array, dtype: type[np.unsignedinteger[Any]]) -> Array:
    """View bytes as wider unsigned integers."""
    return np.ascontiguousarray(block_BX).view(dtype)


def nibbles(byte_BX: Array) -> Array:
    """Return the low nibbles of all bytes, then the high ones."""
    return np.concatenate([byte_BX & 15, byte_BX >> 4], axis=-1)


def nibble_pairs(byte_BX: Array) -> Array:
    """Return each byte's low and high nibble in turn."""
    return flat(np.stack([byte_BX & 15, byte_BX >> 4], axis=-1))


def each_bit(byte_BX: Array) -> Array:
    """Return the bits of bytes, lowest first."""
    return np.unpackbits(byte_BX, axis=1, bitorder="little")


def four_chunks(byte_BX: Array) -> Array:
    """Return the nibbles of four chunks, each the low nibbles of 32 bytes and then the high ones."""
    return nibbles(byte_BX.reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP)


def quarters(byte_BX: Array) -> Array:
    """Return two-bit integers [B, 2, 4, 32]: a byte holds one of each of four runs of 32."""
    return byte_BX.reshape(-1, 2, 1, GROUP) >> SHIFTS[:, None] & 3


def flat(array_BX: Array) -> Array:
    """Flatten to one row per block."""
    return array_BX.reshape(len(array_BX), -1)
