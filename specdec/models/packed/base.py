"""What published formats of integers share: the tensors of a matrix, and how words are unpacked.

A layer's matrix `NAME.weight` lies in several tensors, such as `NAME.qweight` and `NAME.scales`. Here it goes
by the name that it had before it was quantised, so that the families' names and recipes serve as they are.
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
"""Bits of the words that numbers are packed in, the first one lowest."""
FLOATS = ("F16", "BF16", "F32")
"""What scales may be stored as."""


LONGEST_EXPRESSION, MOST_REPEATS = 512, 4
"""What an expression of layers' names may have: a folder must not hold its reader up."""


def compile_names(fields: Fields, field: str, expression: str) -> re.Pattern[str]:
    """Compile an expression of layers' names; refuse one that could take long to match.

    A repeat of a group may try exponentially many ways; single signs repeated a few times try few.
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
class Numbers:
    """How the numbers of a matrix were rounded."""

    bits: int
    group: int | None
    """Inputs that share a scale, 16 or a multiple of 32; None: all of an output's."""
    symmetric: bool
    """The middle of the range stands for 0, and there are no other zero points."""
    listed: bool = False
    """Which group an input is in is said by a list (GPTQ's `desc_act`)."""
    offsets: bool = False
    """Something is added to the weights of each group (GGUF)."""

    @property
    def by_group(self) -> bool:
        """Whether scales are kept by group; without groups only 8 bits keep one for each output."""
        return self.bits == 4 or self.group is not None or not self.symmetric

    @property
    def fits_tiles(self) -> bool:
        """Whether a GPU's kernels keep them packed, as `triton_integers.fits_tiles` decides."""
        is_plain = self.symmetric and not self.offsets and self.group != HALF
        return is_plain and self.bits != 6 and self.by_group == (self.bits == 4)

    def groups(self, inputs: int) -> int:
        """Count an output's scales."""
        return -(-inputs // self.group) if self.group else 1

    def words(self, count: int) -> int:
        """Count the words that pack this many numbers."""
        return -(-count * self.bits // WORD)

    def num_bytes(self, shape: Shape) -> int:
        """Count the bytes of matrices of this shape as they are multiplied."""
        pairs = self.offsets or self.group == HALF or not self.symmetric
        return integers.num_bytes(shape, self.bits, by_group=self.by_group, pairs=pairs)


class Part(NamedTuple):
    """What one of a matrix's tensors must be."""

    shape: Shape
    dtypes: tuple[str, ...]


class Raw(NamedTuple):
    """A matrix out of its words; numbers and zero points in int8, less the middle of their range."""

    number_ND: Tensor
    scale_NG: Tensor
    zero_NG: Tensor | None = None
    offset_NG: Tensor | None = None


class Unfit(Exception):
    """A tensor, named first in the message, holds numbers that cannot be used."""


@dataclass(frozen=True, slots=True)
class PackedMatrix(ABC):
    """One matrix of a checkpoint, and the tensors that it lies in."""

    name: str
    """Without `.weight`."""
    held: Mapping[str, Shape]
    """Its tensors that are there, by their suffixes."""
    numbers: Numbers

    marker: ClassVar[str]
    """The suffix that tells that a matrix is stored so."""
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
        """Return the matrix's shape, from those of its tensors, which were checked."""

    @abstractmethod
    def parts(self, shape: Shape) -> Mapping[str, Part]:
        """Return the expected tensors by suffix for a matrix of this size."""

    @abstractmethod
    def unpack(self, shape: Shape, tensors: Mapping[str, Tensor]) -> Raw:
        """Unpack the integers."""

    def read(self, shape: Shape, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Integers:
        """Make the matrix of its tensors, as it is multiplied; nothing is rounded."""
        number_ND, scale_NG, zero_NG, offset_NG = self.unpack(shape, tensors)
        bits, group = self.numbers.bits, min(self.numbers.group or GROUP, GROUP)
        columns = -(-shape[1] // group)
        scales = next(suffix for suffix in self.suffixes if "scale" in suffix)
        if not all(largest(own_NG) < math.inf for own_NG in (scale_NG, offset_NG) if own_NG is not None):
            raise Unfit(f"{self.name}.{scales} holds NaN or Inf")
        if not self.numbers.by_group:
            return Integers(number_ND, scale_NG[:, 0].float(), bits, dtype)
        scale_NG = self.narrow(scale_NG)
        repeat = (self.numbers.group or columns * group) // group

        def spread(own_NG: Tensor) -> Tensor:
            each_NG = own_NG.repeat_interleave(repeat, 1)[:, :columns] if repeat > 1 else own_NG
            return each_NG.contiguous()

        zero_NG = None if zero_NG is None else spread(zero_NG)
        return Integers(number_ND, spread(scale_NG), bits, dtype, zero_NG, offset_NG, group)

    def narrow(self, scale_NG: Tensor) -> Tensor:
        """Return a group's scales in 16 bits; raise `Unfit` where that would round them."""
        if scale_NG.dtype != torch.float32:
            return scale_NG
        narrow_NG = scale_NG.half()
        if not torch.equal(narrow_NG.float(), scale_NG):
            suffix = next(own for own in self.suffixes if "scale" in own)
            raise Unfit(
                f"{self.name}.{suffix} holds float32 scales of groups, which float16 would round; "
                "specdec needs them in 16 bits"
            )
        return narrow_NG

    def zeros_as_announced(self, suffix: str, zero_NG: Tensor) -> Tensor | None:
        """Leave zero points out that the config announces to be the middle of the range."""
        if not self.numbers.symmetric:
            return zero_NG
        if bool(zero_NG.any()):
            raise Unfit(
                f"{self.name}.{suffix} holds zero points, and config.json announces symmetric numbers"
            )
        return None


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """The format of a folder, as its config announces it."""

    name: str
    kinds: tuple[type[PackedMatrix], ...]
    numbers_of: Callable[[str], Numbers | None]
    """How a layer of a name was rounded; None: it is left out."""
    note: str = ""
    """What is done otherwise than the config announces."""

    def find(self, checkpoint: Checkpoint) -> tuple[dict[str, PackedMatrix], list[str]]:
        """List the matrices stored in integers, by the names that they had before.

        Also name those that are stored so and that the config leaves out.
        """
        found: dict[str, PackedMatrix] = {}
        left_out: list[str] = []
        for disk in checkpoint.names():
            name, _, suffix = disk.rpartition(".")
            for kind in self.kinds:
                if suffix != kind.marker or not kind.is_at(checkpoint, name):
                    continue
                if len(checkpoint.shape(disk)) != 2:
                    continue
                if numbers := self.numbers_of(name):
                    disks = {own: f"{name}.{own}" for own in kind.suffixes}
                    held = {own: checkpoint.shape(at) for own, at in disks.items() if at in checkpoint}
                    found[f"{name}.weight"] = kind(name, held, numbers)
                else:
                    left_out.append(disk)
        return found, left_out


def largest(own_NG: Tensor) -> float:
    """Return the largest size of some numbers; NaN if one is NaN."""
    return max(map(abs, map(float, own_NG.aminmax()))) if own_NG.numel() else 0.0


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers [..., 32 W / bits] of words [..., W] in int8, less the middle of their range."""
    # A copy: of one word a row, torch calls any stride contiguous and views none of them as bytes.
    bytes_ = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return (bytes_ ^ 128).view(torch.int8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).view(torch.int8) - 8


def read_bits(fields: Fields, *names: str, supported: tuple[int, ...]) -> int:
    """Read how many bits a number has."""
    bits = fields.integer(*names)
    if bits not in supported:
        name = next((own for own in names if own in fields), names[0])
        fields.refuse(
            name, f"{' or '.join(map(str, supported))} bits, or the checkpoint that was not quantised"
        )
    return bits


def read_group(fields: Fields, *names: str) -> int | None:
    """Read how many inputs share a scale; None: all of them."""
    group = fields.integer(*names, least=-1)
    if group == -1:
        return None
    if group == 0 or group % GROUP:
        name = next((own for own in names if own in fields), names[0])
        fields.refuse(name, f"groups of a multiple of {GROUP} inputs, or -1 for one scale of each output")
    return group
