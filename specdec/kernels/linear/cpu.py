"""y = x Wᵀ + b, with bfloat16 weights laid out once as oneDNN's kernels read them.

The layout costs nothing in exactness for the narrow windows of decoding and reads cold weights 1.5 times as
fast as `F.linear`. Its operators are not public, so this file is the only one that names them.

Weights of eight bits are widened once, to what they stand for: a processor has no matrix units for them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix, widen

BLOCKED_FROM = 1 << 12
"""Weights with fewer entries live in the cache; the operator's overhead would be all that is seen."""


class Packed(NamedTuple):
    weight_ND: Tensor
    bias_N: Tensor | None
    blocked: bool


def _can_block(weight_ND: Tensor) -> bool:
    return (
        weight_ND.device.type == "cpu"
        and weight_ND.dtype == torch.bfloat16
        and weight_ND.numel() >= BLOCKED_FROM
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> Packed:
    """Lay the weight out for the CPU's matrix units where there are any; one row decides the layout.

    Of several that stand below one another the outputs follow each other.
    """
    parts = weight if isinstance(weight, list) else [weight]
    weight_ND = widen(parts[0]) if len(parts) == 1 else torch.cat([widen(part) for part in parts])
    if not _can_block(weight_ND):
        return Packed(weight_ND.contiguous(), bias_N, blocked=False)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous(), 1)
    return Packed(blocked, bias_N, blocked=True)


def linear(x_TD: Tensor, packed: Packed) -> Tensor:
    """Multiply in the weight's own dtype."""
    weight, bias_N, blocked = packed
    if blocked:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, weight, bias_N, "none", [], "")
        return y_TN
    return F.linear(x_TD, weight, bias_N)


def pack_heads(weight_HNK: Tensor) -> Tensor:
    """Lay each head's weight out as a product from the left reads it: [H, K, N]."""
    return weight_HNK.transpose(1, 2).contiguous()


def linear_by_head(x_THK: Tensor, packed: Tensor) -> Tensor:
    """Multiply each head by a weight of its own, all in one call."""
    return torch.bmm(x_THK.transpose(0, 1), packed).transpose(0, 1)
