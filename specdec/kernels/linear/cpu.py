"""y = x Wᵀ + b, with bfloat16 weights stored in oneDNN's packed layout.

The packed layout is exact for decode's narrow windows and reads cold weights 1.5 times as fast as `F.linear`.
Its operators are not public; only this file uses them.

8-bit weights are widened once to the model's dtype: CPUs have no matrix units for them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix, widen

BLOCKED_FROM = 1 << 12
"""Minimum entries of a packed weight: smaller ones stay in the cache, where the operator's overhead
dominates."""


class CpuPackedLinear(NamedTuple):
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


def pack(weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> CpuPackedLinear:
    """Pack a weight for the CPU's matrix units, if it has them; the layout is chosen for single rows.

    The outputs of several weights are concatenated.
    """
    parts = weight if isinstance(weight, list) else [weight]
    weight_ND = widen(parts[0]) if len(parts) == 1 else torch.cat([widen(part) for part in parts])
    if not _can_block(weight_ND):
        return CpuPackedLinear(weight_ND.contiguous(), bias_N, blocked=False)
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous(), 1)
    return CpuPackedLinear(blocked, bias_N, blocked=True)


def linear(x_TD: Tensor, packed: CpuPackedLinear) -> Tensor:
    """Multiply in the weight's own dtype."""
    weight, bias_N, blocked = packed
    if blocked:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TD, weight, bias_N, "none", [], "")
        return y_TN
    return F.linear(x_TD, weight, bias_N)


def pack_heads(weight_HNK: Tensor) -> Tensor:
    """Transpose each head's weight to [H, K, N], the order that a batched product reads."""
    return weight_HNK.transpose(1, 2).contiguous()


def linear_by_head(x_THK: Tensor, packed: Tensor) -> Tensor:
    """Multiply each head by its own weight, all in one call."""
    return torch.bmm(x_THK.transpose(0, 1), packed).transpose(0, 1)
