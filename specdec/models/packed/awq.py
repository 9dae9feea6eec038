"""AWQ's "gemm" layout: words along the outputs, each with the even ones of eight before the odd."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specdec.models.fields import Fields
from specdec.models.layouts import Shape
from specdec.models.packed.base import (
    FLOATS,
    WORD,
    PackedFormat,
    PackedMatrix,
    PackedTensorSpec,
    QuantisationScheme,
    UnpackedMatrix,
    read_bits,
    read_group,
    unpack_words,
)

NAME = "awq"
PLACE_IN_WORD = [0, 4, 1, 5, 2, 6, 3, 7]
"""Position of each of eight outputs in a word."""


@dataclass(frozen=True, slots=True)
class AwqMatrix(PackedMatrix):
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]."""

    marker: ClassVar[str] = "qweight"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    @property
    def shape(self) -> Shape:
        inputs, words = self.held["qweight"]
        return words * WORD // self.scheme.bits, inputs

    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        (outputs, inputs), scheme = shape, self.scheme
        return {
            "qweight": PackedTensorSpec((inputs, scheme.words(outputs)), ("I32",)),
            "qzeros": PackedTensorSpec((scheme.groups(inputs), scheme.words(outputs)), ("I32",)),
            "scales": PackedTensorSpec((scheme.groups(inputs), outputs), FLOATS),
        }

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        number_ND, zero_NG = (self._unpack(tensors[suffix], shape[0]) for suffix in ("qweight", "qzeros"))
        return UnpackedMatrix(number_ND, tensors["scales"].T, self.zeros_as_announced("qzeros", zero_NG))

    def _unpack(self, words: Tensor, outputs: int) -> Tensor:
        in_words = unpack_words(words, self.scheme.bits).view(len(words), -1, len(PLACE_IN_WORD))
        number_KN: Tensor = in_words[..., PLACE_IN_WORD].flatten(1)[:, :outputs]
        return number_KN.T.contiguous()


def read_format(fields: Fields) -> PackedFormat:
    """Read a config's quantisation format."""
    for name in ("version", "format"):
        if str(fields.get(name) or "gemm").lower() != "gemm":
            fields.refuse(name, "the layout 'gemm'")
    fields.only("backend", "auto", "autoawq", "legacy_awq", "gemm", "marlin")
    numbers = QuantisationScheme(
        read_bits(fields, "bits", "w_bit", supported=(4,)),
        read_group(fields, "group_size", "q_group_size"),
        symmetric=not fields.flag("zero_point", default=True),
    )
    unquantised = frozenset(fields.strings("modules_to_not_convert") or ())

    def scheme_of(name: str) -> QuantisationScheme | None:
        # Match whole name components: a router "gate" must not match "gate_proj".
        parts = name.split(".")
        spans = itertools.combinations(range(len(parts) + 1), 2)
        return None if any(".".join(parts[a:b]) in unquantised for a, b in spans) else numbers

    return PackedFormat(NAME, (AwqMatrix,), scheme_of)
