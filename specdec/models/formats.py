"""The formats of weights beside the model's own dtype, and what a config says of them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from specdec.kernels.linear import fp8
from specdec.kernels.linear.fp8 import BLOCK
from specdec.kernels.linear.integers import INT4, INT8
from specdec.kernels.linear.matrix import Matrix, Stored
from specdec.models.fields import Fields


class WeightFormat(Protocol):
    """A format that large matrices can be rounded to while they are loaded."""

    @property
    def output(self) -> "WeightFormat | None":
        """What the matrix that makes logits is rounded to, if it is."""
        ...

    @property
    def rounds_fp8(self) -> bool:
        """Whether what is stored in FP8 is rounded anew."""
        ...

    def quantise(self, weight: Stored) -> Matrix:
        """Round a matrix, or one of each expert."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Matrix:
        """Return room for a matrix, or one of each expert."""
        ...

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Count the bytes of a matrix of this shape, scales included."""
        ...


FORMATS: Mapping[str, WeightFormat] = MappingProxyType({"fp8": fp8, "int8": INT8, "int4": INT4})
"""By the names that `quantize` knows."""
WHOLE = ("int8", "int4")
"""Those of whole numbers."""

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
