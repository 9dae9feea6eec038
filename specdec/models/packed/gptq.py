"""GPTQ: words along the inputs, scales and zero points by group; version 1 stores zero points minus one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
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
    Unfit,
    UnpackedMatrix,
    compile_names,
    read_bits,
    read_group,
    unpack_words,
)

NAME = "gptq"


@dataclass(frozen=True, slots=True)
class GptqMatrix(PackedMatrix):
    """qweight [K / 8, N], qzeros [G, N / 8], scales [G, N], and g_idx [K], the group of each input.

    Without g_idx groups are consecutive, unless `desc_act` announces another order of inputs.
    """

    marker: ClassVar[str] = "qweight"
    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales", "g_idx")
    zero_offset: ClassVar[int] = 0
    """Subtracted from zero points before packing."""

    @property
    def shape(self) -> Shape:
        rows, outputs = self.held["qweight"]
        return outputs, rows * WORD // self.scheme.bits

    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        (outputs, inputs), scheme = shape, self.scheme
        parts = {
            "qweight": PackedTensorSpec((scheme.words(inputs), outputs), ("I32",)),
            "qzeros": PackedTensorSpec((scheme.groups(inputs), scheme.words(outputs)), ("I32",)),
            "scales": PackedTensorSpec((scheme.groups(inputs), outputs), FLOATS),
        }
        is_needed = scheme.listed and scheme.groups(inputs) > 1
        order = (
            {"g_idx": PackedTensorSpec((inputs,), ("I32", "I64"))}
            if is_needed or "g_idx" in self.held
            else {}
        )
        return parts | order

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        (outputs, inputs), scheme = shape, self.scheme
        self._refuse_order(tensors.get("g_idx"), inputs)
        number_ND = unpack_words(tensors["qweight"].T, scheme.bits)[:, :inputs].contiguous()
        zero_NG = unpack_words(tensors["qzeros"], scheme.bits)[:, :outputs].T
        if self.zero_offset:
            last = (1 << scheme.bits) - 1
            if bool((zero_NG == last - (1 << scheme.bits - 1)).any()):
                raise Unfit(
                    f"{self.name}.qzeros holds {last}, one more than which is {last + 1} to some readers and "
                    "0 to others; specdec needs it in checkpoint_format 'gptq_v2'"
                )
            zero_NG = zero_NG + self.zero_offset
        return UnpackedMatrix(number_ND, tensors["scales"].T, self.zeros_as_announced("qzeros", zero_NG))

    def _refuse_order(self, g_idx: Tensor | None, inputs: int) -> None:
        group = self.scheme.group or inputs
        if g_idx is not None and not torch.equal(g_idx.long().cpu(), torch.arange(inputs) // group):
            raise Unfit(
                f"{self.name}.g_idx puts inputs into groups out of their order (desc_act); specdec needs a "
                "checkpoint that was quantised with desc_act false"
            )


@dataclass(frozen=True, slots=True)
class GptqMatrixV1(GptqMatrix):
    zero_offset: ClassVar[int] = 1


def read_format(fields: Fields) -> PackedFormat:
    """Read a config's quantisation format."""
    for name in ("checkpoint_format", "format"):
        fields.only(name, "gptq", "gptq_v2")
    fields.only("pack_dtype", "int32", "torch.int32")
    fields.absent("is_marlin_format", "weights in the order of GPTQ (false)")
    default = _numbers(fields)
    rules = _dynamic(fields, default)

    def scheme_of(name: str) -> QuantisationScheme | None:
        return next((own for pattern, own in rules if pattern.match(name)), default)

    kind = GptqMatrix if fields.get("checkpoint_format", "format") == "gptq_v2" else GptqMatrixV1
    return PackedFormat(NAME, (kind,), scheme_of)


def _numbers(fields: Fields, default: QuantisationScheme | None = None) -> QuantisationScheme:
    """Read the quantisation of layers; missing fields are taken from `default`."""
    bits = default.bits if default and "bits" not in fields else read_bits(fields, "bits", supported=(4, 8))
    group = default.group if default and "group_size" not in fields else read_group(fields, "group_size")
    return QuantisationScheme(
        bits,
        group,
        symmetric=fields.flag("sym", default=default.symmetric if default else True),
        listed=fields.flag("desc_act", default=default.listed if default else False),
    )


def _dynamic(
    fields: Fields, default: QuantisationScheme
) -> list[tuple[re.Pattern[str], QuantisationScheme | None]]:
    """Read per-layer overrides, exclusions first."""
    dynamic = fields.within("dynamic")
    rules: list[tuple[re.Pattern[str], QuantisationScheme | None]] = []
    for rule in dynamic.names():
        pattern = compile_names(dynamic, rule, rule.removeprefix("-:").removeprefix("+:"))
        rules.append((pattern, None if rule.startswith("-:") else _numbers(dynamic.within(rule), default)))
    return sorted(rules, key=lambda own: own[1] is not None)
