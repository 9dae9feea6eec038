"""y = x Wᵀ + b."""

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    weight_ND: Tensor
    bias_N: Tensor | None


def pack(weight_ND: Tensor, bias_N: Tensor | None = None) -> Packed:
    """Keep the weight as it is."""
    return Packed(weight_ND, bias_N)


def linear(x_TD: Tensor, packed: Packed) -> Tensor:
    """Multiply, sum in float32 or wider, and round once, to the weight's dtype."""
    weight_ND, bias_N = packed
    y_TN = _wide(x_TD) @ _wide(weight_ND).T
    return (y_TN if bias_N is None else y_TN + bias_N).to(weight_ND.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
