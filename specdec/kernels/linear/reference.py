"""y = x Wᵀ + b."""

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    weight_ND: Tensor
    bias_N: Tensor | None


def pack(weight_ND: Tensor, bias_N: Tensor | None = None) -> Packed:
    """Keep the weight as it is."""
    return Packed(weight_ND, bias_N)


def linear(x_TD: Tensor, packed: Packed) -> Tensor:
    """Multiply in the weight's own dtype."""
    y_TN = x_TD @ packed.weight_ND.T
    return y_TN if packed.bias_N is None else y_TN + packed.bias_N
