"""A GGUF file's tensors under a checkpoint's names: widened, or integers and their scales."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.files import GGUF
from specdec.models.gguf.architectures import Described
from specdec.models.gguf.blocks import GROUP, integers, scales, widen
from specdec.models.gguf.file import Entry, GgufFile

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Header(NamedTuple):
    """What is known of a tensor without reading it, as safetensors tells it."""

    shape: tuple[int, ...]
    dtype: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def parts(path: Path) -> list[Path]:
    """Name the files of a model: those of one that is split are told by their names."""
    found = _PART.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found[3])
    names = (path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf") for i in range(1, count + 1))
    return [own for own in names if own.exists()]


def open_files(path: Path) -> GgufFile:
    """Open a file with the tensors of all its parts."""
    if path.name == GGUF and path.is_symlink():
        path = path.parent / os.readlink(path)  # and no further: in the hub's cache a link has the name
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
    for other in files[1:]:
        first.entries.update(GgufFile(other).entries)
    return first


class GgufTensors:
    """Offers what a file of safetensors does: names, headers, and tensors by name.

    Matrices of integers are two tensors, as in compressed-tensors: the numbers, and their scales.
    """

    def __init__(self, path: Path) -> None:
        self._described = Described(open_files(path))
        self._names = dict(self._described.names())
        self._integers = {disk for disk in self._names if self._described.bits(disk, self._entry(disk))}
        self._names |= {f"{disk}_scale": self._names[disk] for disk in self._integers}

    def keys(self) -> Sequence[str]:
        return list(self._names)

    def get_slice(self, disk: str) -> Header:
        """Return a tensor's shape and type without reading it."""
        entry = self._entry(disk)
        if disk in self._integers:
            return Header(entry.shape, "I8")
        if self._is_scale(disk):
            return Header((entry.shape[0], entry.shape[1] // GROUP), "F16")
        recipe = self._described.recipe(disk)
        shape = entry.shape if recipe is None else recipe(torch.empty(entry.shape, device="meta")).shape
        return Header(tuple(shape), self._described.dtype)

    def get_tensor(self, disk: str) -> Tensor:
        """Return a tensor as the checkpoint had it, but for what was rounded."""
        entry = self._entry(disk)
        read = integers if disk in self._integers else scales if self._is_scale(disk) else widen
        made = read(torch.from_numpy(entry.data.copy()), entry.kind, entry.shape)
        recipe = self._described.recipe(disk)
        return recipe(made).contiguous() if recipe else made

    def _is_scale(self, disk: str) -> bool:
        return disk not in self._integers and disk.removesuffix("_scale") in self._integers

    def _entry(self, disk: str) -> Entry:
        return self._described.file.entries[self._names[disk]]
