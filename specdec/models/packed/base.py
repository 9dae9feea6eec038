"""Common parts of published integer formats: a matrix's tensors, and unpacking words.

A layer's matrix `NAME.weight` is stored as several tensors, such as `NAME.qweight` and `NAME.scales`. Here it
has the name from before quantisation, so the families' names and recipes apply unchanged.
"""

import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.linear import integers
from specdec.kernels.linear.integers import GROUP, HALF, Integers
from specdec.models.checkpoint import Checkpoint
from specdec.models.fields import Fields
from specdec.models.layouts import Shape

WORD = 32
"""Bits of a word of packed integers, the first one lowest."""
FLOATS = ("F16", "BF16", "F32")
"""Dtypes of scales."""


LONGEST_EXPRESSION, MOST_REPEATS = 512, 4
"""Limits of a regular expression for layer names: a checkpoint must not stall its loader."""


def compile_names(fields: Fields, field: str, expression: str) -> re.Pattern[str]:
    """Compile a regular expression for layer names; refuse one that could be slow to match.

    A repeated group may backtrack exponentially; a few repeated single characters do not.
    """
    signs = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", expression)
    slow = re.search(r"\)[*+?{]", signs) or re.search(r"\\[1-9]|\(\?P=", expression)
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", signs))
    try:
        if len(expression) <= LONGEST_EXPRESSION and repeats <= MOST_REPEATS and not slow:
            with warnings.catch_warnings(action="ignore"):
                return re.compile(expression)
    except (re.error, OverflowError, RecursionError):
        pass
    fields.refuse(
        field,
        f"regular expressions of layers' names with at most {LONGEST_EXPRESSION} characters and "
        f"{MOST_REPEATS} repeats, none of them of a group",
    )


@dataclass(frozen=True, slots=True)
class QuantisationScheme:
    """How a matrix was quantised."""

    bits: int
    group: int | None
    """Inputs per scale, 16 or a multiple of 32; None: all of an output's."""
    symmetric: bool
    """The middle of the range is 0, and there are no other zero points."""
    listed: bool = False
    """A list gives each input's group (GPTQ's `desc_act`)."""
    offsets: bool = False
    """Each group has an offset (GGUF)."""

    @property
    def by_group(self) -> bool:
        """True if scales are stored by group; otherwise (8 bits only) by output."""
        return self.bits == 4 or self.group is not None or not self.symmetric

    @property
    def fits_tiles(self) -> bool:
        """True if a GPU's kernels keep it packed, as `triton_integers.fits_tiles` decides."""
        is_plain = self.symmetric and not self.offsets and self.group != HALF
        return is_plain and self.bits != 6 and self.by_group == (self.bits == 4)

    def groups(self, inputs: int) -> int:
        """Return the scales per output."""
        return -(-inputs // self.group) if self.group else 1

    def words(self, count: int) -> int:
        """Return the words that pack this many integers."""
        return -(-count * self.bits // WORD)

    def num_bytes(self, shape: Shape) -> int:
        """Return the bytes of matrices of this shape in CPU layout."""
        pairs = self.offsets or self.group == HALF or not self.symmetric
        return integers.num_bytes(shape, self.bits, by_group=self.by_group, pairs=pairs)


class PackedTensorSpec(NamedTuple):
    """Expected shape and dtypes of one of a matrix's tensors."""

    shape: Shape
    dtypes: tuple[str, ...]


class UnpackedMatrix(NamedTuple):
    """An unpacked matrix; integers and zero points in int8, minus the middle of their range."""

    number_ND: Tensor
    scale_NG: Tensor
    zero_NG: Tensor | None = None
    offset_NG: Tensor | None = None


class Unfit(Exception):
    """A tensor, named first in the message, has unusable values."""


@dataclass(frozen=True, slots=True)
class PackedMatrix(ABC):
    """One matrix of a checkpoint, and its stored tensors."""

    name: str
    """Without `.weight`."""
    held: Mapping[str, Shape]
    """Its present tensors, by suffix."""
    scheme: QuantisationScheme

    marker: ClassVar[str]
    """Suffix that identifies this format."""
    suffixes: ClassVar[tuple[str, ...]]

    @classmethod
    def is_at(cls, checkpoint: Checkpoint, name: str) -> bool:
        """Return whether a tensor with the marker belongs to a matrix of this kind."""
        return True

    @property
    def disk(self) -> tuple[str, ...]:
        """Return its tensors' names."""
        return tuple(f"{self.name}.{suffix}" for suffix in self.held)

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Return the matrix's shape, derived from its checked tensors."""

    @abstractmethod
    def parts(self, shape: Shape) -> Mapping[str, PackedTensorSpec]:
        """Return the expected tensors by suffix for a matrix of this size."""

    @abstractmethod
    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> UnpackedMatrix:
        """Unpack the integers."""

    def read(self, shape: Shape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Integers:
        """Build the matrix from its tensors, without rounding."""
        number_ND, scale_NG, zero_NG, offset_NG = self.unpack(shape, tensors)
        bits, group = self.scheme.bits, min(self.scheme.group or GROUP, GROUP)
        columns = -(-shape[1] // group)
        scales = next(suffix for suffix in self.suffixes if "scale" in suffix)
        if not all(largest(own_NG) < math.inf for own_NG in (scale_NG, offset_NG) if own_NG is not None):
            raise Unfit(f"{self.name}.{scales} holds NaN or Inf")
        if not self.scheme.by_group:
            return Integers(number_ND, scale_NG[:, 0].float(), bits, dtype)
        scale_NG = self.narrow(scale_NG)
        repeat = (self.scheme.group or columns * group) // group

        def spread(value_NG: Tensor) -> Tensor:
            entry_ND = value_NG.repeat_interleave(repeat, 1)[:, :columns] if repeat > 1 else value_NG
            return entry_ND.contiguous()

        zero_NG = None if zero_NG is None else spread(zero_NG)
        return Integers(number_ND, spread(scale_NG), bits, dtype, zero_NG, offset_NG, group)

    def narrow(self, scale_NG: Tensor) -> Tensor:
        """Return scales in 16 bits; raise `Unfit` if that would round them."""
        if scale_NG.dtype != torch.float32:
            return scale_NG
        narrow_NG = scale_NG.half()
        if not torch.equal(narrow_NG.float(), scale_NG):
            suffix = next(name for name in self.suffixes if "scale" in name)
            raise Unfit(
                f"{self.name}.{suffix} holds float32 scales of groups, which float16 would round; "
                "specdec needs them in 16 bits"
            )
        return narrow_NG

    def zeros_as_announced(self, suffix: str, zero_NG: Tensor) -> Tensor | None:
        """Return zero points, or None if the config announces symmetric integers and they agree."""
        if not self.scheme.symmetric:
            return zero_NG
        if bool(zero_NG.any()):
            raise Unfit(
                f"{self.name}.{suffix} holds zero points, and config.json announces symmetric numbers"
            )
        return None


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """A checkpoint's format, as announced in its config."""

    name: str
    kinds: tuple[type[PackedMatrix], ...]
    scheme_of: Callable[[str], QuantisationScheme | None]
    """Quantisation of a layer by name; None: not quantised."""
    note: str = ""
    """Deviations from the announced format."""

    def find(self, checkpoint: Checkpoint) -> tuple[dict[str, PackedMatrix], list[str]]:
        """Return the integer matrices by their names before quantisation.

        Also return the names of integer matrices that the config excludes.
        """
        matrices: dict[str, PackedMatrix] = {}
        incomplete: list[str] = []
        for disk in checkpoint.names():
            name, _, suffix = disk.rpartition(".")
            for kind in self.kinds:
                if suffix != kind.marker or not kind.is_at(checkpoint, name):
                    continue
                if len(checkpoint.shape(disk)) != 2:
                    continue
                if numbers := self.scheme_of(name):
                    paths = {end: f"{name}.{end}" for end in kind.suffixes}
                    shapes = {end: checkpoint.shape(at) for end, at in paths.items() if at in checkpoint}
                    matrices[f"{name}.weight"] = kind(name, shapes, numbers)
                else:
                    incomplete.append(disk)
        return matrices, incomplete


def largest(own_NG: Tensor) -> float:
    """Return the largest absolute value; NaN if there is a NaN."""
    return max(map(abs, map(float, own_NG.aminmax()))) if own_NG.numel() else 0.0


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack words [..., W] to int8 [..., 32 W / bits], minus the middle of their range."""
    # Copy: with one word per row torch calls any stride contiguous but cannot view it as bytes.
    bytes_ = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return (bytes_ ^ 128).view(torch.int8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).view(torch.int8) - 8


def read_bits(fields: Fields, *names: str, supported: tuple[int, ...]) -> int:
    """Read the bits per integer."""
    bits = fields.integer(*names)
    if bits not in supported:
        name = next((option for option in names if option in fields), names[0])
        fields.refuse(
            name, f"{' or '.join(map(str, supported))} bits, or the checkpoint that was not quantised"
        )
    return bits


def read_group(fields: Fields, *names: str) -> int | None:
    """Read the inputs per scale; None: all of them."""
    group = fields.integer(*names, least=-1)
    if group == -1:
        return None
    if group == 0 or group % GROUP:
        name = next((option for option in names if option in fields), names[0])
        fields.refuse(name, f"groups of a multiple of {GROUP} inputs, or -1 for one scale of each output")
    return group
