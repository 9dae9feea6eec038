"""The formats of weights beside the model's own dtype, and what a config says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from specdec.kernels.linear import fp8
from specdec.kernels.linear.fp8 import BLOCK
from specdec.kernels.linear.integers import INT4, INT8
from specdec.kernels.linear.matrix import Matrix, Stored
from specdec.models.fields import Fields
from specdec.models.packed import awq, compressed, gguf, gptq
from specdec.models.packed.base import PackedFormat


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
"""Those of integers."""

_FIELD = "quantization_config"
_PACKED = MappingProxyType({own.NAME: own.read_format for own in (gptq, awq, compressed, gguf)})


@dataclass(frozen=True, slots=True)
class Announced:
    """What a config says of how its large matrices are stored."""

    name: str
    packed: PackedFormat | None = None
    """None: 8-bit floats in blocks."""


def announced(*levels: Fields) -> Announced | None:
    """Return how a config, on any level, says that matrices are stored; refuse what cannot be read.

    How FP8 would round activations is not asked: they stay in the model's dtype, which is more exact.
    """
    found = [_read(fields.within(_FIELD)) for fields in levels if fields.get(_FIELD)]
    return found[0] if found else None


def _read(fields: Fields) -> Announced:
    method = fields.get("quant_method")
    if isinstance(method, str) and method in _PACKED:
        packed = _PACKED[method](fields)
        return Announced(packed.name, packed)
    needed = f"(8-bit floats in blocks of {BLOCK} by {BLOCK}), or the checkpoint that was not quantised"
    if method != "fp8":
        others = ", ".join(map(repr, _PACKED))
        fields.refuse("quant_method", f"{others}, or 'fp8' {needed}")
    if fields.get("fmt") not in (None, "e4m3"):
        fields.refuse("fmt", f"'e4m3' {needed}")
    if fields.get("weight_block_size") != [BLOCK, BLOCK]:
        fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] {needed}")
    return Announced("fp8")
