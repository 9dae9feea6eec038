"""Matrix products with packed weights."""

from collections.abc import Callable, Collection, Mapping
from typing import Self

import torch
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix, join
from specdec.kernels.table import Kernels
from specdec.models.weights import Weights

Projection = Callable[[Tensor], Tensor]
"""A product with packed tokens: a Linear, or several that work as one."""


class Linear:
    """y = x Wᵀ + b, with a weight packed once for these kernels.

    Its `Matrix` determines the storage: a tensor or a quantised format.
    """

    __slots__ = ("_multiply", "packed")

    def __init__(self, kernels: Kernels, weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> None:
        """Pack a weight, or several in their own formats, whose outputs are concatenated."""
        self._multiply, self.packed = kernels.linear, kernels.pack(weight, bias_N)

    @classmethod
    def load(
        cls,
        weights: Weights,
        kernels: Kernels,
        rows: Mapping[str, int],
        columns: int,
        *,
        bias: bool = False,
        exact: Collection[str] = (),
    ) -> Self:
        """Load matrices that read the same tokens, with the rows of each; `exact` ones stay unquantised."""
        parts = [
            (weights.take if name in exact else weights.matrix)(f"{name}.weight", (count, columns))
            for name, count in rows.items()
        ]
        biases = [weights.take(f"{name}.bias", (count,)) for name, count in rows.items()] if bias else []
        return cls(kernels, join(parts), torch.cat(biases) if biases else None)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Multiply packed tokens."""
        return self._multiply(x_TD, self.packed)


class LinearByHead:
    """y_h = x_h W_hᵀ, with a weight per head in the model's dtype, packed once."""

    __slots__ = ("_multiply", "packed")

    def __init__(self, kernels: Kernels, weight_HNK: Tensor) -> None:
        self._multiply, self.packed = kernels.linear_by_head, kernels.pack_heads(weight_HNK)

    def __call__(self, x_THK: Tensor) -> Tensor:
        """Multiply packed tokens, head by head."""
        return self._multiply(x_THK, self.packed)
