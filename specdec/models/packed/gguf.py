"""Matrices of a GGUF file: int8 integers, scales per 32 or 16 inputs, and offsets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specdec.kernels.linear.integers import HALF, sixteen_bits
from specdec.models.fields import Fields
from specdec.models.gguf.storage_types import INTEGER_TYPES
from specdec.models.layouts import Shape
from specdec.models.packed.base import (
    PackedFormat,
    PackedTensorSpec,
    QuantisationScheme,
    Unfit,
    UnpackedMatrix,
    largest,
)
from specdec.models.packed.compressed import PlainInts

NAME = "gguf"
LARGEST = 65504
"""Largest float16."""
OFFSET = "weight_offset"


@dataclass(frozen=True, slots=True)
class GgufInts(PlainInts):
    """weight [N, K] in int8, weight_scale [N, G] in float16 or float32, weight_offset [N, G] in float32."""

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", OFFSET)

    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        by_group = PackedTensorSpec((shape[0], self.scheme.groups(shape[1])), ("F16", "F32"))
        parts = {"weight": PackedTensorSpec(shape, ("I8",)), "weight_scale": by_group}
        return {**parts, OFFSET: by_group} if self.scheme.offsets else parts

    def narrow(self, scale_NG: Tensor) -> Tensor:
        """Return scales unchanged after a range check: packing rounds them to float16."""
        is_pair = self.scheme.offsets or self.scheme.group == HALF
        if is_pair or sixteen_bits(scale_NG) is None:
            self._check(scale_NG)
        return scale_NG

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        offset_NG = tensors.get(OFFSET)
        if offset_NG is not None:
            self._check(offset_NG)
        return PlainInts.unpack(self, shape, tensors)._replace(offset_NG=offset_NG)

    def _check(self, own_NG: Tensor) -> None:
        if largest(own_NG) > LARGEST:
            raise Unfit(f"{self.name}.weight holds scales or offsets above {LARGEST:,}, the most of float16")


def read_format(fields: Fields) -> PackedFormat:
    """Read which layers are stored in which types."""
    types, layers = fields.within("types"), dict[str, QuantisationScheme]()
    for name in types.names():
        kind = INTEGER_TYPES.get(name)
        if kind is None or not kind.bits:
            types.refuse(name, f"the types {', '.join(INTEGER_TYPES)}")
        numbers = QuantisationScheme(kind.bits, kind.group, symmetric=True, offsets=kind.offsets)
        layers |= dict.fromkeys(types.strings(name) or (), numbers)
    return PackedFormat(", ".join(types.names()), (GgufInts,), layers.get, str(fields.get("note") or ""))
