"""Quantised weight formats, and their announcement in a config."""

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
    """A format that large matrices can be quantised to while loading."""

    @property
    def output(self) -> "WeightFormat | None":
        """Format of the output matrix, None for the model's dtype."""
        ...

    @property
    def rounds_fp8(self) -> bool:
        """True if FP8 weights are requantised."""
        ...

    def quantise(self, weight: Stored) -> Matrix:
        """Quantise a matrix, or one per expert."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Matrix:
        """Allocate a matrix, or one per expert."""
        ...

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix of this shape, including scales."""
        ...


FORMATS: Mapping[str, WeightFormat] = MappingProxyType({"fp8": fp8, "int8": INT8, "int4": INT4})
"""Formats by their `quantize` names."""
WHOLE = ("int8", "int4")
"""Integer formats."""

_FIELD = "quantization_config"
_PACKED = MappingProxyType({own.NAME: own.read_format for own in (gptq, awq, compressed, gguf)})


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    """A config's storage format of large matrices."""

    name: str
    packed: PackedFormat | None = None
    """None: block-scaled FP8."""


def announced(*levels: Fields) -> QuantisationConfig | None:
    """Return the storage format announced on any level of a config; refuse unsupported ones.

    FP8 activation settings are ignored: activations stay in the model's dtype, which is more exact.
    """
    formats = [_read(fields.within(_FIELD)) for fields in levels if fields.get(_FIELD)]
    return formats[0] if formats else None


def _read(fields: Fields) -> QuantisationConfig:
    method = fields.get("quant_method")
    if isinstance(method, str) and method in _PACKED:
        packed = _PACKED[method](fields)
        return QuantisationConfig(packed.name, packed)
    needed = f"(8-bit floats in blocks of {BLOCK} by {BLOCK}), or the checkpoint that was not quantised"
    if method != "fp8":
        supported = ", ".join(map(repr, _PACKED))
        fields.refuse("quant_method", f"{supported}, or 'fp8' {needed}")
    if fields.get("fmt") not in (None, "e4m3"):
        fields.refuse("fmt", f"'e4m3' {needed}")
    if fields.get("weight_block_size") != [BLOCK, BLOCK]:
        fields.refuse("weight_block_size", f"[{BLOCK}, {BLOCK}] {needed}")
    return QuantisationConfig("fp8")
