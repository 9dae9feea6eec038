"""A checkpoint's tensors by their names before quantisation, and their sizes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from specdec.kernels.linear.integers import Integers
from specdec.models.checkpoint import Checkpoint
from specdec.models.formats import QuantisationConfig
from specdec.models.layouts import Shape
from specdec.models.packed.base import PackedMatrix, PackedTensorSpec, QuantisationScheme


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """Sizes of integer matrices."""

    format: str
    bytes_by_bits: Mapping[int, int]
    """Bytes on disk, including scales and zero points, by bits per integer."""
    entries: int
    """Number of integers."""
    multiplied: int
    """Bytes in a CPU's layout."""
    tiled: int
    """Bytes of those in a GPU's tile layout."""
    untiled: int
    """Number of integers that a GPU widens."""

    @property
    def stored(self) -> int:
        return sum(self.bytes_by_bits.values())


class Sizes(NamedTuple):
    """Bytes of a checkpoint's tensors."""

    stored: int
    """All tensors."""
    float8: int
    """FP8 tensors without their scales."""
    packed: PackedSizes | None
    """None: the config announces no integers."""


class Tensors:
    """Presents a checkpoint's tensors as if unquantised, and reads integer matrices."""

    def __init__(self, checkpoint: Checkpoint, announced: QuantisationConfig | None) -> None:
        packed = announced and announced.packed
        self._checkpoint, self._format = checkpoint, packed.name if packed else None
        self._packed: dict[str, PackedMatrix]
        self._packed, self.left_out = packed.find(checkpoint) if packed else ({}, [])
        parts = {disk for matrix in self._packed.values() for disk in matrix.disk}
        self.names = frozenset(checkpoint.names()) - parts | self._packed.keys()

    def scheme(self, name: str) -> QuantisationScheme | None:
        """Return a matrix's integer storage, or None."""
        return self._packed[name].scheme if name in self._packed else None

    def bytes(self, name: str) -> int:
        """Return a tensor's bytes, with all parts of a packed one."""
        disk = self._packed[name].disk if name in self._packed else (name,)
        return sum(self._checkpoint.info(part).bytes for part in disk)

    def missing(self, name: str, shape: Shape) -> Iterator[str]:
        """Yield the missing parts of a packed matrix."""
        for disk, (part_shape, _) in self._parts(name, shape).items():
            if disk not in self._checkpoint:
                yield f"{disk} {list(part_shape)}, a part of {name}"

    def misshapen(self, name: str, shape: Shape) -> Iterator[str]:
        """Yield problems of the present parts of a packed matrix."""
        if len(shape) != 2:
            yield f"{name} is stored as integers, which specdec supports for matrices only"
        for disk, (part_shape, dtypes) in self._parts(name, shape).items():
            if disk not in self._checkpoint:
                continue
            info = self._checkpoint.info(disk)
            if info.dtype not in dtypes:
                yield f"{disk} is stored as {info.dtype}, specdec reads {', '.join(dtypes)}"
            elif info.shape != part_shape:
                yield f"{disk} is {list(info.shape)}, config.json makes it {list(part_shape)}"

    def read(self, name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Integers:
        """Read a packed matrix with checked parts into its own memory; raises `Unfit`."""
        matrix = self._packed[name]
        tensors = {
            suffix: self._checkpoint.copy(f"{matrix.name}.{suffix}", device) for suffix in matrix.parts(shape)
        }
        return matrix.read(shape, tensors, dtype)

    def is_idle_bias(self, name: str) -> bool:
        """Return whether a tensor is the zero bias that some tools store with each packed matrix."""
        stem, _, leaf = name.rpartition(".")
        is_bias = leaf == "bias" and f"{stem}.weight" in self._packed
        return is_bias and not bool(self._checkpoint.tensor(name).any())

    def sizes(self) -> Sizes:
        """Return the bytes of all tensors."""
        infos = [self._checkpoint.info(name) for name in self._checkpoint.names()]
        stored, float8 = sum(i.bytes for i in infos), sum(i.bytes for i in infos if i.dtype.startswith("F8_"))
        if self._format is None:
            return Sizes(stored, float8, None)
        bits, matrices = dict.fromkeys((4, 6, 8), 0), self._packed.items()
        for name, matrix in matrices:
            bits[matrix.scheme.bits] += self.bytes(name)
        numbers = sum(prod(matrix.shape) for _, matrix in matrices)
        multiplied = sum(matrix.scheme.num_bytes(matrix.shape) for _, matrix in matrices)
        fitting = [matrix for _, matrix in matrices if matrix.scheme.fits_tiles]
        tiled = sum(matrix.scheme.num_bytes(matrix.shape) for matrix in fitting)
        untiled = numbers - sum(prod(matrix.shape) for matrix in fitting)
        return Sizes(stored, float8, PackedSizes(self._format, bits, numbers, multiplied, tiled, untiled))

    def _parts(self, name: str, shape: Shape) -> dict[str, PackedTensorSpec]:
        if len(shape) != 2:
            return {}
        matrix = self._packed[name]
        return {f"{matrix.name}.{suffix}": part for suffix, part in matrix.parts(shape).items()}
