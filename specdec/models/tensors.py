"""A checkpoint's tensors by the names that they had before it was quantised, and what they take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from specdec.kernels.linear.integers import Integers
from specdec.models.checkpoint import Checkpoint
from specdec.models.formats import Announced
from specdec.models.layouts import Shape
from specdec.models.packed.base import Numbers, PackedMatrix, Part


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """Sizes of matrices of integers."""

    format: str
    bytes_by_bits: Mapping[int, int]
    """On disk, with scales and zero points, by the bits of a number."""
    numbers: int
    """How many there are."""
    multiplied: int
    """Bytes of them as a CPU multiplies them."""
    tiled: int
    """Bytes of those that a GPU multiplies, in tiles."""
    untiled: int
    """How many numbers a GPU widens."""

    @property
    def stored(self) -> int:
        return sum(self.bytes_by_bits.values())


class Sizes(NamedTuple):
    """Bytes of a checkpoint's tensors."""

    stored: int
    """Of all of them."""
    float8: int
    """Of 8-bit floats without their scales."""
    packed: PackedSizes | None
    """None: the config announces none."""


class Tensors:
    """Present a checkpoint's tensors as if no matrix were packed, and read those that are."""

    def __init__(self, checkpoint: Checkpoint, announced: Announced | None) -> None:
        packed = announced and announced.packed
        self._checkpoint, self._format = checkpoint, packed.name if packed else None
        self._packed: dict[str, PackedMatrix]
        self._packed, self.left_out = packed.find(checkpoint) if packed else ({}, [])
        parts = {disk for matrix in self._packed.values() for disk in matrix.disk}
        self.names = frozenset(checkpoint.names()) - parts | self._packed.keys()

    def numbers(self, name: str) -> Numbers | None:
        """Return how a matrix's integers are stored; None: it has none."""
        return self._packed[name].numbers if name in self._packed else None

    def bytes(self, name: str) -> int:
        """Count what a tensor takes, all parts of a packed one."""
        disk = self._packed[name].disk if name in self._packed else (name,)
        return sum(self._checkpoint.info(own).bytes for own in disk)

    def missing(self, name: str, shape: Shape) -> Iterator[str]:
        """Yield the parts that a packed matrix lacks."""
        for disk, (own, _) in self._parts(name, shape).items():
            if disk not in self._checkpoint:
                yield f"{disk} {list(own)}, a part of {name}"

    def misshapen(self, name: str, shape: Shape) -> Iterator[str]:
        """Yield what is wrong with the parts of a packed matrix that are present."""
        if len(shape) != 2:
            yield f"{name} is stored as integers, which specdec supports for matrices only"
        for disk, (own, dtypes) in self._parts(name, shape).items():
            if disk not in self._checkpoint:
                continue
            info = self._checkpoint.info(disk)
            if info.dtype not in dtypes:
                yield f"{disk} is stored as {info.dtype}, specdec reads {', '.join(dtypes)}"
            elif info.shape != own:
                yield f"{disk} is {list(info.shape)}, config.json makes it {list(own)}"

    def read(self, name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Integers:
        """Read a packed matrix whose parts are all right, in memory of its own; raises `Unfit`."""
        matrix = self._packed[name]
        tensors = {
            suffix: self._checkpoint.copy(f"{matrix.name}.{suffix}", device) for suffix in matrix.parts(shape)
        }
        return matrix.read(shape, tensors, dtype)

    def is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is the zero bias that some tools store beside each packed matrix."""
        stem, _, leaf = name.rpartition(".")
        beside = leaf == "bias" and f"{stem}.weight" in self._packed
        return beside and not bool(self._checkpoint.tensor(name).any())

    def sizes(self) -> Sizes:
        """Count the bytes of all tensors."""
        infos = [self._checkpoint.info(name) for name in self._checkpoint.names()]
        stored, float8 = sum(i.bytes for i in infos), sum(i.bytes for i in infos if i.dtype.startswith("F8_"))
        if self._format is None:
            return Sizes(stored, float8, None)
        bits, matrices = dict.fromkeys((4, 6, 8), 0), self._packed.items()
        for name, matrix in matrices:
            bits[matrix.numbers.bits] += self.bytes(name)
        numbers = sum(prod(matrix.shape) for _, matrix in matrices)
        multiplied = sum(matrix.numbers.num_bytes(matrix.shape) for _, matrix in matrices)
        fitting = [matrix for _, matrix in matrices if matrix.numbers.fits_tiles]
        tiled = sum(matrix.numbers.num_bytes(matrix.shape) for matrix in fitting)
        untiled = numbers - sum(prod(matrix.shape) for matrix in fitting)
        return Sizes(stored, float8, PackedSizes(self._format, bits, numbers, multiplied, tiled, untiled))

    def _parts(self, name: str, shape: Shape) -> dict[str, Part]:
        if len(shape) != 2:
            return {}
        matrix = self._packed[name]
        return {f"{matrix.name}.{suffix}": part for suffix, part in matrix.parts(shape).items()}
