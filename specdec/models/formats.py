"""The formats of weights beside the model's own dtype, and what a config says of them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from specdec.kernels.linear import fp8
from specdec.kernels.linear.fp8 import BLOCK
from specdec.kernels.linear.matrix import Matrix
from specdec.models.fields import Fields


class WeightFormat(Protocol):
    """A format that large matrices can be rounded to while they are loaded."""

    def quantise(self, weight_ND: Tensor) -> Matrix:
        """Round a matrix, or one of each expert."""
        ...

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of a matrix of this shape, scales included."""
        ...


FORMATS: Mapping[str, WeightFormat] = MappingProxyType({"fp8": fp8})
"""By the names that `quantize` knows."""

_FIELD = "quantization_config"


def stores_fp8(*levels: Fields) -> bool:
    """Tell whether a config, on any of its levels, announces 8-bit weights; refuse other quantised ones.

    How activations were to be rounded is not asked: they stay in the model's dtype, which is more exact.
    """
    return any([_announces(fields) for fields in levels])


def _announces(fields: Fields) -> bool:
    if not fields.get(_FIELD):
        return False
    announced = fields.within(_FIELD)
    needed = f"(8-bit floats in blocks of {BLOCK} by {BLOCK}), or the checkpoint that was not quantised"
    if announced.get("quant_method") != "fp8":
        announced.refuse("quant_method", f"'fp8' {needed}")
    if announced.get("fmt") not in (None, "e4m3"):
        announced.refuse("fmt", f"'e4m3' {needed}")
    if announced.get("weight_block_size") != [BLOCK, BLOCK]:
        announced.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] {needed}")
    return True
