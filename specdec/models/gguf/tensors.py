"""A GGUF file's tensors under a checkpoint's names: widened, or whole numbers and their scales."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.gguf.architectures import Described
from specdec.models.gguf.blocks import GROUP, numbers, scales, widen
from specdec.models.gguf.file import Entry, GgufFile

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Header(NamedTuple):
    """What is known of a tensor without reading it, as safetensors tells it."""

    shape: tuple[int, ...]
    dtype: str = "F32"

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return self.dtype


def open_files(path: Path) -> list[GgufFile]:
    """Open a file and, of one that is split, the others."""
    path = path.resolve()
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    found = _PART.fullmatch(path.name)
    if type(count) is not int or count < 2:
        return [first]
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
    return [
        first,
        *(GgufFile(path.with_name(f"{found[1]}-{i:05}-of-{found[3]}.gguf")) for i in range(2, count + 1)),
    ]


class GgufTensors:
    """Offers what a file of safetensors does: names, headers, and tensors by name.

    Matrices of whole numbers are two tensors, as in compressed-tensors: the numbers, and their scales.
    """

    def __init__(self, path: Path) -> None:
        first, *others = open_files(path)
        self._file_of = {name: file for file in (first, *others) for name in file.entries}
        for file in others:
            first.entries.update(file.entries)
        self._described = Described(first)
        self._names = dict(self._described.names())
        self._whole = {
            disk for disk, name in self._names.items() if self._described.bits(disk, first.entries[name])
        }
        self._names |= {f"{disk}_scale": self._names[disk] for disk in self._whole}

    def keys(self) -> Sequence[str]:
        return list(self._names)

    def get_slice(self, disk: str) -> Header:
        """Return a tensor's shape and type without reading it."""
        entry = self._entry(disk)
        if disk in self._whole:
            return Header(entry.shape, "I8")
        if disk.removesuffix("_scale") in self._whole:
            return Header((entry.shape[0], entry.shape[1] // GROUP), "F16")
        recipe = self._described.recipe(disk)
        shape = entry.shape if recipe is None else recipe(torch.empty(entry.shape, device="meta")).shape
        return Header(tuple(shape))

    def get_tensor(self, disk: str) -> Tensor:
        """Return a tensor as the checkpoint had it, but for what was rounded."""
        entry = self._entry(disk)
        data_X = torch.from_numpy(self._file_of[self._names[disk]].numbers(entry).copy())
        is_scale = disk not in self._whole and disk.removesuffix("_scale") in self._whole
        read = numbers if disk in self._whole else scales if is_scale else widen
        recipe, made = self._described.recipe(disk), read(data_X, entry.kind, entry.shape)
        return recipe(made).contiguous() if recipe else made

    def _entry(self, disk: str) -> Entry:
        name = self._names[disk]
        return self._file_of[name].entries[name]
