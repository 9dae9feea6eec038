"""Matrices of a GGUF file: integers as they are in int8, scales of 32 or 16 inputs, and offsets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specdec.models.fields import Fields
from specdec.models.gguf.blocks import KEPT
from specdec.models.layouts import Shape
from specdec.models.packed.base import Numbers, PackedFormat, Part, Raw
from specdec.models.packed.compressed import PlainInts

NAME = "gguf"
OFFSET = "weight_offset"


@dataclass(frozen=True, slots=True)
class GgufInts(PlainInts):
    """weight [N, K] in int8, weight_scale and weight_offset [N, G] in float16."""

    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", OFFSET)

    def parts(self, shape: Shape) -> Mapping[str, Part]:
        by_group = Part((shape[0], self.numbers.groups(shape[1])), ("F16",))
        found = {"weight": Part(shape, ("I8",)), "weight_scale": by_group}
        return {**found, OFFSET: by_group} if self.numbers.offsets else found

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> Raw:
        return Raw(tensors["weight"], tensors["weight_scale"], offset_NG=tensors.get(OFFSET))


def read_format(fields: Fields) -> PackedFormat:
    """Read which layers are stored in which types."""
    types, layers = fields.within("types"), dict[str, Numbers]()
    for name in types.names():
        if name not in KEPT:
            types.refuse(name, f"the types {', '.join(KEPT)}")
        bits, group, middle = KEPT[name]
        numbers = Numbers(bits, group, symmetric=True, offsets=bool(middle))
        layers |= dict.fromkeys(types.strings(name) or (), numbers)
    return PackedFormat(", ".join(types.names()), (GgufInts,), layers.get)
