"""Numbers in blocks, widened to float32: exactly what llama.cpp's own definition of each type says."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdec.models.gguf.file import Kind

GROUP = 32
"""Weights that share a scale, in Q4_K and Q5_K too."""
BITS = {"Q8_0": 8, "Q5_0": 8, "Q4_0": 4}
"""Types that are integers times a scale, and the bits that they are kept in."""
PIECE = 1 << 16
"""Blocks that are widened together: beside a large matrix there is no memory for several copies."""


def widen(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of a tensor's bytes in float32, some blocks at a time."""
    if kind.name in _WIDE:
        return data_X.view(_WIDE[kind.name]).view(shape).float()
    block_BX, wide_X = data_X.view(-1, kind.bytes), torch.empty(shape)
    for first in range(0, len(block_BX), PIECE):
        piece_BX, wide_BN = block_BX[first:][:PIECE], wide_X.view(-1, kind.numbers)[first:][:PIECE]
        if kind.name in BITS:
            torch.mul(_half(piece_BX[:, :2]), _integers(piece_BX, kind), out=wide_BN)
        else:
            wide_BN.copy_(_FORMS[kind.name](piece_BX).view(wide_BN.shape))
    return wide_X


def integers(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of a type in `BITS`, in int8."""
    return _integers(data_X.view(-1, kind.bytes), kind).reshape(shape)


def scales(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return what they are multiplied by, in float16, one for each 32 of a row."""
    block_BX = data_X.view(-1, kind.bytes)
    return block_BX[:, :2].contiguous().view(torch.float16).view(shape[0], -1)


def _integers(block_BX: Tensor, kind: Kind) -> Tensor:
    if kind.name == "Q8_0":
        return block_BX[:, 2:].view(torch.int8)
    if kind.name == "Q4_0":
        return _nibbles(block_BX[:, 2:]).to(torch.int8) - 8
    return (_nibbles(block_BX[:, 6:]) | _fifth_bits(block_BX[:, 2:6])).to(torch.int8) - 16


_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(block_BX: Tensor) -> Tensor:
    """Read float16 numbers, two bytes each."""
    return block_BX.contiguous().view(torch.float16).float()


def _nibbles(byte_BX: Tensor) -> Tensor:
    """Return the low halves of bytes, then the high ones."""
    return torch.cat([byte_BX & 15, byte_BX >> 4], dim=-1)


def _fifth_bits(byte_B4: Tensor) -> Tensor:
    """Return 32 bits, the lowest first, each worth 16."""
    shift_8 = torch.arange(8, dtype=torch.uint8)
    return ((byte_B4[..., None] >> shift_8 & 1) << 4).flatten(1)


def _q4_1(block_BX: Tensor) -> Tensor:
    scale_B2 = _half(block_BX[:, :4])
    return scale_B2[:, :1] * _nibbles(block_BX[:, 4:]).float() + scale_B2[:, 1:]


def _q5_1(block_BX: Tensor) -> Tensor:
    scale_B2 = _half(block_BX[:, :4])
    number_BN = _nibbles(block_BX[:, 8:]) | _fifth_bits(block_BX[:, 4:8])
    return scale_B2[:, :1] * number_BN.float() + scale_B2[:, 1:]


def _scales(block_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of eight groups, [B, 8, 1]: six bits each, times the block's own."""
    first_B4, second_B4, third_B4 = block_BX[:, 4:16].view(-1, 3, 4).unbind(1)
    scale_B8 = torch.cat([first_B4 & 63, third_B4 & 15 | first_B4 >> 6 << 4], dim=1)
    least_B8 = torch.cat([second_B4 & 63, third_B4 >> 4 | second_B4 >> 6 << 4], dim=1)
    own_B2 = _half(block_BX[:, :4])
    return (own_B2[:, :1] * scale_B8.float())[..., None], (own_B2[:, 1:] * least_B8.float())[..., None]


def _q4_k(block_BX: Tensor) -> Tensor:
    scale_B81, least_B81 = _scales(block_BX)
    number_B8N = _nibbles(block_BX[:, 16:].view(-1, 4, GROUP)).view(-1, 8, GROUP)
    return scale_B81 * number_B8N.float() - least_B81


def _q5_k(block_BX: Tensor) -> Tensor:
    scale_B81, least_B81 = _scales(block_BX)
    bit_8 = torch.arange(8, dtype=torch.uint8)[:, None]
    high_B8N = (block_BX[:, 16:48][:, None] >> bit_8 & 1) << 4
    number_B8N = _nibbles(block_BX[:, 48:].view(-1, 4, GROUP)).view(-1, 8, GROUP) | high_B8N
    return scale_B81 * number_B8N.float() - least_B81


def _q6_k(block_BX: Tensor) -> Tensor:
    low_B2X, high_B2X = block_BX[:, :128].view(-1, 2, 64), block_BX[:, 128:192].view(-1, 2, 1, 32)
    shift_4 = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    number_B24N = _nibbles(low_B2X).view(-1, 2, 4, 32) | (high_B2X >> shift_4 & 3) << 4
    scale_BG = block_BX[:, 192:208].view(torch.int8).float() * _half(block_BX[:, 208:])
    return scale_BG[..., None] * (number_B24N.view(-1, 16, 16).float() - 32)


_FORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{"Q4_1": _q4_1, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k},
}
