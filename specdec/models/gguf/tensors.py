"""A GGUF file's tensors under checkpoint names: widened, or integers and their scales."""

import os
import re
import reprlib
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.files import GGUF
from specdec.models.gguf.architectures import DescribedFile
from specdec.models.gguf.blocks import integers, offsets, scales, widen
from specdec.models.gguf.file import GgufFile, GgufTensor
from specdec.models.gguf.storage_types import GgufType

SMALL = 1 << 20
"""Maximum size of tensors whose shape comes from a real computation: `meta` tensors, which only norms and
decays would need, make torch import its compiler, which takes 1.2 s."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_AGAIN = "download all parts again, and keep their names"


class Header(NamedTuple):
    """A tensor's shape, dtype and size without its data, with safetensors' interface."""

    shape: tuple[int, ...]
    dtype: str
    stored: int
    """Bytes in the file; for integer matrices all are attributed to the integers."""

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def parts(path: Path) -> list[Path]:
    """Return the files of a model: one, or the existing parts of a split one."""
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found[3])
    names = (path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf") for i in range(1, count + 1))
    return [own for own in names if own.exists()]


def open_files(path: Path) -> GgufFile:
    """Open a file with the tensors of all its parts."""
    if path.name == GGUF and path.is_symlink():
        path = path.parent / os.readlink(path)  # only one link: in the hub's cache a link has the file name
    first, found = GgufFile(path), _PART.fullmatch(path.name)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count < 2:
        return first
    if not found or int(found[3]) != count:
        raise CheckpointError(
            f"{path.name} is one of {count} files; give them their names again, as in "
            f"NAME-00001-of-{count:05}.gguf",
            field="split.count",
        )
    if int(found[2]) != 1:
        raise CheckpointError(
            f"{path.name} is a later part; give the first, {found[1]}-00001-of-{found[3]}.gguf", field="model"
        )
    files = parts(path)
    if len(files) < count:
        raise CheckpointError(
            f"of the {count} parts of {path.name} {len(files)} are there; download the others beside it",
            field="split.count",
        )
    for i, own in enumerate([first, *map(GgufFile, files[1:])]):
        _check("split.no", i, own)
        if own is not first and (twice := first.entries.keys() & own.entries.keys()):
            name = min(twice)[:200]
            raise CheckpointError(
                f"{own.path.name}: an earlier part has the tensor {name} too; {_AGAIN}", field=name
            )
        first.entries.update(own.entries)
    _check("split.tensors.count", len(first.entries), first)
    return first


def _check(name: str, expected: int, file: GgufFile) -> None:
    """Refuse parts of different models, or under exchanged names."""
    found = file.metadata.get(name, expected)
    if type(found) is not int or found != expected:
        raise CheckpointError(
            f"{file.path.name}: {name} is {reprlib.repr(found)}, and of these parts it should be {expected}; "
            f"{_AGAIN}",
            field=name,
        )


class GgufTensors:
    """A GGUF file with safetensors' interface: names, headers, and tensors by name.

    A matrix of integers is several tensors: the integers, their scales, and for some types offsets.
    """

    def __init__(self, path: Path) -> None:
        self._described = DescribedFile(open_files(path))
        self._names = dict(self._described.names())
        self._parts: dict[str, tuple[Callable[[NDArray[Any], GgufType, tuple[int, ...]], Tensor], int]] = {}
        """Reader of each part of an integer matrix, and the inputs per entry."""
        for checkpoint_name, name in self._described.names().items():
            entry = self._entry(checkpoint_name)
            if not self._described.keeps_integers(checkpoint_name, entry):
                continue
            group = entry.kind.group
            parts = {checkpoint_name: (integers, 1), f"{checkpoint_name}_scale": (scales, group)}
            if entry.kind.offsets:
                parts[f"{checkpoint_name}_offset"] = offsets, group
            self._parts |= parts
            self._names |= dict.fromkeys(parts, name)

    def keys(self) -> Sequence[str]:
        return list(self._names)

    def stored_name(self, checkpoint_name: str) -> str:
        """Return a tensor's name in the file; a part of an integer matrix keeps its suffix."""
        part = checkpoint_name.rpartition("_")[2] if checkpoint_name.endswith(("_scale", "_offset")) else ""
        return f"{self._names[checkpoint_name]}_{part}" if part else self._names[checkpoint_name]

    def get_slice(self, checkpoint_name: str) -> Header:
        """Return a tensor's shape and type without reading it."""
        entry = self._entry(checkpoint_name)
        if checkpoint_name in self._parts:
            _, group = self._parts[checkpoint_name]
            own = entry.shape[0], entry.shape[1] // group
            if group == 1:
                return Header(own, "I8", entry.bytes)
            return Header(own, "F32" if checkpoint_name.endswith("_offset") else entry.kind.scale_dtype, 0)
        shape, transform = entry.shape, self._described.transform(checkpoint_name)
        if transform is not None:
            device = "cpu" if prod(shape) <= SMALL else "meta"
            shape = transform(torch.empty(shape, device=device)).shape
        return Header(tuple(shape), self._described.dtype, entry.bytes)

    def get_tensor(self, checkpoint_name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor as in the checkpoint, except for quantisation error.

        Matrices are widened to the given dtype in slices, then rearranged. Vectors and decays may be computed
        from the file's, in float32; the caller rounds them.
        """
        entry = self._entry(checkpoint_name)
        read, _ = self._parts.get(checkpoint_name, (widen, 1))
        if read is widen:
            is_computed = len(entry.shape) == 1 or checkpoint_name.endswith("A_log")
            wide_dtype = torch.float32 if is_computed else dtype
            made = widen(entry.data, entry.kind, entry.shape, wide_dtype, entry.factor)
        else:
            made = read(entry.data, entry.kind, entry.shape)
            if entry.factor != 1 and read is not integers:
                made *= entry.factor
        transform = self._described.transform(checkpoint_name)
        made = transform(made).contiguous() if transform else made
        if checkpoint_name.endswith("A_log") and not made.isfinite().all():  # a logarithm
            name = self._names[checkpoint_name]
            self._described.refuse(name, f"{name} holds decays of 0, of the wrong sign, or NaN or Inf")
        return made

    def _entry(self, checkpoint_name: str) -> GgufTensor:
        return self._described.file.entries[self._names[checkpoint_name]]
