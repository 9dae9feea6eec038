"""y = x Wᵀ + b."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix, widen


class ReferencePackedLinear(NamedTuple):
    parts: tuple[Matrix, ...]
    bias_N: Tensor | None


def pack(weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> ReferencePackedLinear:
    """Store the weights unchanged; outputs of several are concatenated."""
    return ReferencePackedLinear(tuple(weight) if isinstance(weight, list) else (weight,), bias_N)


def linear(x_TD: Tensor, packed: ReferencePackedLinear) -> Tensor:
    """Multiply, sum in float32 or wider, and round once, to the model's dtype."""
    wide = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
    y_TN = torch.cat([x_TD.to(wide) @ _wide(part).T for part in packed.parts], dim=1)
    dtype = packed.parts[0].dtype
    return (y_TN if packed.bias_N is None else y_TN + packed.bias_N).to(dtype)


def _wide(part: Matrix) -> Tensor:
    return widen(part, torch.float64 if part.dtype == torch.float64 else torch.float32)


def pack_heads(weight_HNK: Tensor) -> Tensor:
    """Return the weights unchanged."""
    return weight_HNK


def linear_by_head(x_THK: Tensor, packed: Tensor) -> Tensor:
    """Multiply each head by its own weight, sum in float32 or wider, and round once."""
    wide = torch.float64 if x_THK.dtype == torch.float64 else torch.float32
    return torch.einsum("thk,hnk->thn", x_THK.to(wide), packed.to(wide)).to(packed.dtype)
