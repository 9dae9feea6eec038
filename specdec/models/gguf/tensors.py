"""A GGUF file's tensors under a checkpoint's names, widened when they are asked for."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.gguf.architectures import Described
from specdec.models.gguf.blocks import widen
from specdec.models.gguf.file import GgufFile

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
    """Offers what a file of safetensors does: names, headers, and tensors by name."""

    def __init__(self, path: Path) -> None:
        self._files = open_files(path)
        first = self._files[0]
        self._file_of = {name: file for file in self._files for name in file.entries}
        for file in self._files[1:]:
            first.entries.update(file.entries)
        self._described = Described(first)
        self._names = self._described.names()

    def keys(self) -> Sequence[str]:
        return list(self._names)

    def get_slice(self, disk: str) -> Header:
        """Return a tensor's shape; its numbers come as float32."""
        entry = self._file_of[self._names[disk]].entries[self._names[disk]]
        recipe = self._described.recipe(disk)
        if recipe is None:
            return Header(entry.shape)
        return Header(tuple(recipe(torch.empty(entry.shape, device="meta")).shape))

    def get_tensor(self, disk: str) -> Tensor:
        """Return a tensor as the checkpoint had it, but for what was rounded."""
        name = self._names[disk]
        file = self._file_of[name]
        entry = file.entries[name]
        made = widen(torch.from_numpy(file.numbers(entry).copy()), entry.kind, entry.shape)
        recipe = self._described.recipe(disk)
        return recipe(made) if recipe else made
