"""A copy of a network with large matrices quantised to 4 bits; everything else is shared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.linear.integers import INT4, SMALLEST_OF_4, Integers
from specdec.kernels.linear.matrix import Matrix
from specdec.models.layouts import Shape
from specdec.models.network import Network
from specdec.models.weights import Scoped, Weights

COPIED_IN = "int4"
"""Name of the copies' format."""


@dataclass(frozen=True, slots=True)
class Nibbles:
    """A matrix of 4-bit integers, two per byte, until it is packed."""

    pair_X: Tensor
    matrix: Integers
    """The original matrix except its integers."""

    @classmethod
    def of(cls, matrix: Integers) -> "Nibbles":
        raised_X = (matrix.number_ND - SMALLEST_OF_4).view(torch.uint8).flatten()
        odd_X = raised_X[1::2]
        pair_X = raised_X[::2].clone()
        pair_X[: len(odd_X)] |= odd_X << 4
        shape_only_ND = matrix.number_ND.new_empty(()).expand(matrix.shape)
        return cls(pair_X, matrix._replace(number_ND=shape_only_ND))

    def unpack(self) -> Integers:
        """Return the original matrix."""
        raised_X = torch.stack([self.pair_X & 15, self.pair_X >> 4], dim=1).flatten().view(torch.int8)
        shape = self.matrix.shape
        number_ND = raised_X[: shape.numel()].view(shape) + SMALLEST_OF_4
        return self.matrix._replace(number_ND=number_ND)


class CopySource(Weights, Protocol):
    """The source of a copy; `unused` is true if its tensors are stand-ins because an error will be raised."""

    @property
    def unused(self) -> bool: ...


class CopiedWeights:
    """Passes on a network's weights, and stores quantised large matrices for a copy.

    A matrix is quantised when it is passed on, so nothing is read twice or duplicated: waiting matrices take
    as much memory as the copy will, and are released one by one. Stand-ins are not quantised.
    """

    def __init__(self, weights: CopySource) -> None:
        self._weights = weights
        self._shared: dict[str, Tensor] = {}
        self._rounded: dict[str, Nibbles] = {}
        self._outputs: dict[str, Integers] = {}

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Load a tensor, which the copy will share."""
        self._shared[name] = tensor = self._weights.take(name, shape, dtype)
        return tensor

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Load a matrix and store it quantised."""
        matrix = self._weights.matrix(name, shape)
        if not self._weights.unused:
            self._rounded[name] = Nibbles.of(INT4.quantise(matrix))
        return matrix

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        """Return the output matrix and store it quantised."""
        if not self._weights.unused:
            self._outputs[name] = INT4.output.quantise(weight_ND)
        return self._weights.output(name, weight_ND)

    def has(self, name: str) -> bool:
        """Return whether the tensor is present."""
        return self._weights.has(name)

    def within(self, prefix: str) -> Weights:
        """Return a view of the tensors below a prefix."""
        return Scoped(self, prefix)

    def copy(self, target: Network) -> Network:
        """Build the copy, after the target that loaded these weights."""
        weights = _CachedWeights(self._shared, self._rounded, self._outputs)
        device = target.embed_VD.device
        copy = Network(target.spec, weights, target.kernels, max_length=1, device=device)
        copy.rope = target.rope
        return copy


class _CachedWeights:
    """Hands out the stored weights and releases them."""

    def __init__(
        self, shared: Mapping[str, Tensor], rounded: dict[str, Nibbles], outputs: Mapping[str, Integers]
    ) -> None:
        self._shared, self._rounded, self._outputs = shared, rounded, outputs

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        return self._shared[name]

    def matrix(self, name: str, shape: Shape) -> Matrix:
        return self._rounded.pop(name).unpack()

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        return self._outputs[name]

    def has(self, name: str) -> bool:
        return name in self._shared or name in self._rounded

    def within(self, prefix: str) -> Weights:
        return Scoped(self, prefix)
