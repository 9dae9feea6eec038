"""Numbers in blocks: widened to float32 exactly as llama.cpp defines each type, or kept as integers."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.models.gguf.file import Kind

GROUP = 32
"""Weights that share a scale in most types, in Q4_K and Q5_K too."""
PIECE = 1 << 16
"""Blocks that are read together: beside a large matrix there is no memory for several copies."""


class Form(NamedTuple):
    """How the integers of a type are kept."""

    bits: int
    group: int = GROUP
    """Weights that share a scale."""
    middle: int = 0
    """What is subtracted from unsigned numbers, whose groups have offsets; 0: they are signed, without."""


KEPT: Mapping[str, Form] = {
    "Q8_0": Form(8),
    "Q5_0": Form(6),
    "Q4_0": Form(4),
    "Q4_1": Form(4, middle=8),
    "Q5_1": Form(6, middle=16),
    "Q4_K": Form(4, middle=8),
    "Q5_K": Form(6, middle=16),
    "Q6_K": Form(6, group=16),
    "Q3_K": Form(4, group=16),
    "IQ4_NL": Form(8),
    "IQ4_XS": Form(8),
    "MXFP4": Form(6),
}
"""Types that are multiplied as integers."""
_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def widen(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return the numbers of a tensor's bytes in float32."""
    if kind.name in _WIDE:
        return data_X.view(_WIDE[kind.name]).view(shape).float()
    return _by_pieces(_widen, data_X, kind, torch.empty(shape))


def integers(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return the integers of a type in `KEPT`, in int8 and less the middle of their range."""
    return _by_pieces(_centred, data_X, kind, torch.empty(shape, dtype=torch.int8))


def scales(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return what the integers are multiplied by, in float16 [N, groups]: those of K types are rounded."""
    scale_BG, _ = _SCALES[kind.name](data_X.view(-1, kind.bytes))
    return scale_BG.view(shape[0], -1).half()


def offsets(data_X: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """Return what is added to the products of integers and scales, in float16 [N, groups]."""
    scale_BG, offset_BG = _SCALES[kind.name](data_X.view(-1, kind.bytes))
    assert offset_BG is not None
    return (offset_BG + KEPT[kind.name].middle * scale_BG).view(shape[0], -1).half()


def _by_pieces(read: Callable[[Tensor, Kind], Tensor], data_X: Tensor, kind: Kind, out_X: Tensor) -> Tensor:
    block_BX, out_BN = data_X.view(-1, kind.bytes), out_X.view(-1, kind.numbers)
    for first in range(0, len(block_BX), PIECE):
        out_BN[first:][:PIECE] = read(block_BX[first:][:PIECE], kind)
    return out_X


def _widen(block_BX: Tensor, kind: Kind) -> Tensor:
    scale_BG, offset_BG = _SCALES[kind.name](block_BX)
    wide_BGN = _NUMBERS[kind.name](block_BX).view(*scale_BG.shape, -1) * scale_BG[..., None]
    return (wide_BGN if offset_BG is None else wide_BGN.add_(offset_BG[..., None])).flatten(1)


def _centred(block_BX: Tensor, kind: Kind) -> Tensor:
    number_BN = _NUMBERS[kind.name](block_BX).view(torch.int8)
    middle = KEPT[kind.name].middle
    return number_BN - middle if middle else number_BN


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


def _four_chunks(byte_BX: Tensor) -> Tensor:
    """Return the nibbles of four chunks, each the low halves of 32 bytes and then the high ones."""
    return _nibbles(byte_BX.view(-1, 4, GROUP)).view(-1, 8, GROUP)


def _quarters(byte_BX: Tensor) -> Tensor:
    """Return numbers of two bits, [B, 2, 4, 32]: a byte holds those of four runs of 32."""
    shift_4 = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    return byte_BX.reshape(-1, 2, 1, GROUP) >> shift_4 & 3


def _q3_k(block_BX: Tensor) -> Tensor:
    bit_8 = torch.arange(8, dtype=torch.uint8)[:, None]
    is_high_B8N = block_BX[:, :32][:, None] >> bit_8 & 1
    low_B8N = _quarters(block_BX[:, 32:96]).view(-1, 8, GROUP)
    return (low_B8N | is_high_B8N << 2).flatten(1).view(torch.int8) - 4


def _chosen(table: Tensor, byte_BX: Tensor) -> Tensor:
    """Return a type's values for nibbles."""
    return table[_nibbles(byte_BX).int()]


def _q5_k(block_BX: Tensor) -> Tensor:
    bit_8 = torch.arange(8, dtype=torch.uint8)[:, None]
    high_B8N = (block_BX[:, 16:48][:, None] >> bit_8 & 1) << 4
    return (_four_chunks(block_BX[:, 48:]) | high_B8N).flatten(1)


def _q6_k(block_BX: Tensor) -> Tensor:
    low_B24N = _nibbles(block_BX[:, :128].view(-1, 2, 64)).view(-1, 2, 4, GROUP)
    number_B24N = low_B24N | _quarters(block_BX[:, 128:192]) << 4
    return number_B24N.flatten(1).view(torch.int8) - 32


_IQ4 = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
"""Twice the values of 4-bit floats."""
_NUMBERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": lambda block_BX: block_BX[:, 2:].contiguous().view(torch.int8),
    "Q5_0": lambda block_BX: (
        (_nibbles(block_BX[:, 6:]) | _fifth_bits(block_BX[:, 2:6])).view(torch.int8) - 16
    ),
    "Q4_0": lambda block_BX: _nibbles(block_BX[:, 2:]).view(torch.int8) - 8,
    "Q4_1": lambda block_BX: _nibbles(block_BX[:, 4:]),
    "Q5_1": lambda block_BX: _nibbles(block_BX[:, 8:]) | _fifth_bits(block_BX[:, 4:8]),
    "Q4_K": lambda block_BX: _four_chunks(block_BX[:, 16:]).flatten(1),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q2_K": lambda block_BX: _quarters(block_BX[:, 16:80]).flatten(1),
    "Q3_K": _q3_k,
    "IQ4_NL": lambda block_BX: _chosen(_IQ4, block_BX[:, 2:]),
    "IQ4_XS": lambda block_BX: _chosen(_IQ4, block_BX[:, 8:].view(-1, 8, 16)).flatten(1),
    "MXFP4": lambda block_BX: _chosen(_FP4, block_BX[:, 1:]),
}
"""The integers [B, N] of blocks: signed in int8, unsigned in uint8."""


def _one(block_BX: Tensor) -> tuple[Tensor, None]:
    return _half(block_BX[:, :2]), None


def _two(block_BX: Tensor) -> tuple[Tensor, Tensor]:
    scale_B1, offset_B1 = _half(block_BX[:, :4]).chunk(2, dim=1)
    return scale_B1, offset_B1


def _eight(block_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Read six bits of each group's scale and minimum, times the block's own."""
    first_B4, second_B4, third_B4 = block_BX[:, 4:16].view(-1, 3, 4).unbind(1)
    scale_B8 = torch.cat([first_B4 & 63, third_B4 & 15 | first_B4 >> 6 << 4], dim=1)
    least_B8 = torch.cat([second_B4 & 63, third_B4 >> 4 | second_B4 >> 6 << 4], dim=1)
    own_B1, least_B1 = _half(block_BX[:, :4]).chunk(2, dim=1)
    return own_B1 * scale_B8.float(), -least_B1 * least_B8.float()


def _sixteen(block_BX: Tensor) -> tuple[Tensor, None]:
    return block_BX[:, 192:208].view(torch.int8).float() * _half(block_BX[:, 208:]), None


def _sixteen_pairs(block_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Read four bits of each group's scale and minimum, times the block's own."""
    both_BG, own_B2 = block_BX[:, :16], _half(block_BX[:, 80:])
    return own_B2[:, :1] * (both_BG & 15).float(), -own_B2[:, 1:] * (both_BG >> 4).float()


def _sixteen_of_six_bits(block_BX: Tensor) -> tuple[Tensor, None]:
    low_BG = _nibbles(block_BX[:, 96:104])
    shift_4 = 2 * torch.arange(4, dtype=torch.uint8)[:, None]
    high_BG = (block_BX[:, 104:108][:, None] >> shift_4 & 3).flatten(1)
    scale_BG = (low_BG | high_BG << 4).view(torch.int8) - 32
    return scale_BG.float() * _half(block_BX[:, 108:]), None


def _eight_of_six_bits(block_BX: Tensor) -> tuple[Tensor, None]:
    low_B8 = torch.stack([block_BX[:, 4:8] & 15, block_BX[:, 4:8] >> 4], dim=-1).flatten(1)
    shift_4 = 2 * torch.arange(4, dtype=torch.uint8)
    high_B8 = (block_BX[:, 2:4, None] >> shift_4 & 3).flatten(1)
    return ((low_B8 | high_B8 << 4).view(torch.int8) - 32).float() * _half(block_BX[:, :2]), None


def _power(block_BX: Tensor) -> tuple[Tensor, None]:
    """Return 2 to the power of a byte less 128, through the bits of float32."""
    byte_B1 = block_BX[:, :1].int()
    bits_B1 = torch.where(byte_B1 < 2, 0x200000 << byte_B1.clamp(max=1), byte_B1 - 1 << 23)
    return bits_B1.view(torch.float32), None


_SCALES: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    **dict.fromkeys(("Q8_0", "Q5_0", "Q4_0"), _one),
    **dict.fromkeys(("Q4_1", "Q5_1"), _two),
    **dict.fromkeys(("Q4_K", "Q5_K"), _eight),
    "Q6_K": _sixteen,
    "Q2_K": _sixteen_pairs,
    "Q3_K": _sixteen_of_six_bits,
    "IQ4_NL": _one,
    "IQ4_XS": _eight_of_six_bits,
    "MXFP4": _power,
}
"""The scales [B, G] of blocks, and their offsets where the type has any."""
