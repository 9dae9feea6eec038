"""compressed-tensors: integers packed in words along the inputs, or plain int8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specdec.models.checkpoint import Checkpoint
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

NAME = "compressed-tensors"
PACKED, PLAIN, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
INPUTS, ZEROS = "input_activations", "weight_zero_point"
_LINEAR = "Linear"


@dataclass(frozen=True, slots=True)
class PackedInts(PackedMatrix):
    """weight_packed [N, K / 8], weight_scale [N, G], weight_shape [2], and weight_zero_point [N / 8, G]."""

    marker: ClassVar[str] = "weight_packed"
    suffixes: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape", ZEROS)

    @property
    def shape(self) -> Shape:
        outputs, words = self.held["weight_packed"]
        return outputs, words * WORD // self.scheme.bits

    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        (outputs, inputs), scheme = shape, self.scheme
        parts = {
            "weight_packed": PackedTensorSpec((outputs, scheme.words(inputs)), ("I32",)),
            "weight_scale": PackedTensorSpec((outputs, scheme.groups(inputs)), FLOATS),
            "weight_shape": PackedTensorSpec((2,), ("I32", "I64")),
        }
        if not scheme.symmetric or ZEROS in self.held:
            parts[ZEROS] = PackedTensorSpec((scheme.words(outputs), scheme.groups(inputs)), ("I32",))
        return parts

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        (outputs, inputs), bits = shape, self.scheme.bits
        if (stored_shape := tensors["weight_shape"].tolist()) != list(shape):
            raise Unfit(f"{self.name}.weight_shape is {stored_shape}, config.json makes it {list(shape)}")
        zero_NG = None
        if ZEROS in tensors:
            zero_NG = self.zeros_as_announced(ZEROS, unpack_words(tensors[ZEROS].T, bits).T[:outputs])
        number_ND = unpack_words(tensors["weight_packed"], bits)[:, :inputs].contiguous()
        return UnpackedMatrix(number_ND, tensors["weight_scale"], zero_NG)


@dataclass(frozen=True, slots=True)
class PlainInts(PackedMatrix):
    """weight [N, K] and weight_zero_point [N, G] in int8, weight_scale [N, G]."""

    marker: ClassVar[str] = "weight_scale"
    suffixes: ClassVar[tuple[str, ...]] = ("weight", "weight_scale", ZEROS)

    @classmethod
    def is_at(cls, checkpoint: Checkpoint, name: str) -> bool:
        """Return whether the weight is int8, neither packed nor FP8."""
        weight = f"{name}.weight"
        return weight in checkpoint and checkpoint.info(weight).dtype == "I8"

    @property
    def shape(self) -> Shape:
        return self.held["weight"]

    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        by_group = shape[0], self.scheme.groups(shape[1])
        parts = {
            "weight": PackedTensorSpec(shape, ("I8",)),
            "weight_scale": PackedTensorSpec(by_group, FLOATS),
        }
        if not self.scheme.symmetric or ZEROS in self.held:
            parts[ZEROS] = PackedTensorSpec(by_group, ("I8",))
        return parts

    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        number_ND, bound = tensors["weight"], 1 << self.scheme.bits - 1
        if self.scheme.bits < 8 and not -bound <= int(number_ND.min()) <= int(number_ND.max()) < bound:
            raise Unfit(f"{self.name}.weight holds numbers of more than {self.scheme.bits} bits")
        zero_NG = self.zeros_as_announced(ZEROS, tensors[ZEROS]) if ZEROS in tensors else None
        return UnpackedMatrix(number_ND, tensors["weight_scale"], zero_NG)


class _Layers:
    """Layers given by name, by expressions with the prefix re:, or all of them."""

    def __init__(self, fields: Fields, field: str) -> None:
        targets = fields.strings(field) or ()
        expressions = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
        self.patterns = [compile_names(fields, field, target) for target in expressions]
        self.names = frozenset(targets) - {_LINEAR}
        self.all = _LINEAR in targets

    def match(self, name: str) -> bool:
        """Return whether an expression matches a layer."""
        return any(pattern.match(name) for pattern in self.patterns)


def read_format(fields: Fields) -> PackedFormat:
    """Read a config's quantisation format."""
    supported = f"{PACKED!r} or {PLAIN!r}, or the checkpoint that was not quantised"
    if fields.get("format") not in (PACKED, PLAIN, MIXED):
        fields.refuse("format", supported)
    fields.absent("kv_cache_scheme", "keys and values without scales of their own (null)")
    sparse = fields.within("sparsity_config")
    if sparse.get("format") not in (None, "dense"):
        sparse.refuse("format", "dense weights (null)")
    if fields.get("transform_config"):
        fields.refuse("transform_config", "weights without transforms (null)")
    ignored, groups = _Layers(fields, "ignore"), fields.within("config_groups")
    rules: list[tuple[_Layers, QuantisationScheme]] = []
    note = ""
    for name in groups.names():
        group = groups.within(name)
        if group.get("format") not in (None, PACKED, PLAIN):
            group.refuse("format", supported)
        rules.append((_Layers(group, "targets"), _numbers(group)))
        if INPUTS in group:
            note = "inputs are rounded to 8 bits in groups of 32, finer than config.json announces"
    if not rules:
        fields.refuse("config_groups", "groups of layers with their targets and weights")

    def scheme_of(name: str) -> QuantisationScheme | None:
        if name in ignored.names or ignored.match(name):
            return None
        # A layer's own name takes precedence over an expression, and that over a class.
        found = [numbers for layers, numbers in rules if name in layers.names]
        found += [numbers for layers, numbers in rules if layers.match(name)]
        return next(iter(found + [numbers for layers, numbers in rules if layers.all]), None)

    return PackedFormat(NAME, (PackedInts, PlainInts), scheme_of, note)


def _numbers(group: Fields) -> QuantisationScheme:
    """Read the quantisation of a group's layers; refuse unsupported parts."""
    weights = group.within("weights")
    bits = read_bits(weights, "num_bits", supported=(4, 8))
    weights.only("type", "int")
    weights.absent("dynamic", "scales that are stored (false)")
    weights.only("actorder", False, "weight", "static")
    size = read_group(weights, "group_size") if "group_size" in weights else None
    if (strategy := weights.get("strategy")) is None:
        strategy = "tensor" if "group_size" not in weights else "group" if size else "channel"
    if strategy not in ("channel", "group") or (strategy == "group") != (size is not None):
        weights.refuse("strategy", "'channel', or 'group' with a group_size")
    group.absent("output_activations", "outputs that are not rounded (null)")
    if INPUTS in group:
        _check_inputs(group.within(INPUTS))
    return QuantisationScheme(bits, size, weights.flag("symmetric", default=True))


def _check_inputs(inputs: Fields) -> None:
    """Accept dynamic 8-bit inputs: ours are quantised in groups of 32, which loses less."""
    inputs.only("type", "int")
    read_bits(inputs, "num_bits", supported=(8,))
    if inputs.get("dynamic") is not True:
        inputs.refuse("dynamic", "inputs that are rounded as they come (true)")
