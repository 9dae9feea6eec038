"""Read and check a Hugging Face model folder: config.json and memory-mapped safetensors files.

A GGUF file is read through the folder that describes it.

No pickle is opened and no code of a checkpoint is run.
"""

import json
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.config.folders import anew, has_file
from specdec.errors import CheckpointError
from specdec.models.files import GGUF, INDEX, SINGLE
from specdec.models.folder import find_folder, short
from specdec.models.gguf.tensors import GgufTensors, Header

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# json accepts Python's Infinity; exporters that avoid it write a tagged object.
_TAGGED = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


class TensorInfo(NamedTuple):
    """One tensor's entry in a file's header."""

    shape: tuple[int, ...]
    dtype: str
    stored: int | None = None
    """Bytes on disk, if shape and type do not determine them: the tensor may be part of a GGUF file's."""

    @property
    def bytes(self) -> int:
        """Return the size of the tensor's data on disk."""
        if self.stored is not None:
            return self.stored
        return math.prod(self.shape) * (_DTYPES[self.dtype].itemsize if self.dtype in _DTYPES else 1)


class Checkpoint:
    """A model folder. Files stay mapped while the object lives; tensors are read on demand."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_folder(folder)
        self.config: Mapping[str, Any] = self._json("config.json", required=True)
        self.generation_config: Mapping[str, Any] = self._json("generation_config.json", required=False)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        if has_file(self.folder / SINGLE):
            self._open(SINGLE)
        elif has_file(self.folder / INDEX):
            self._open_shards()
        elif has_file(self.folder / GGUF):
            self._hold(GGUF, GgufTensors(self.folder / GGUF))
        else:
            self._explain_absence()

    @property
    def gguf_file(self) -> Path | None:
        """Return the GGUF file that the folder describes, or None."""
        link = self.folder / GGUF
        return link.readlink() if link.is_symlink() else None

    def _json(self, name: str, *, required: bool) -> dict[str, Any]:
        path = self.folder / name
        if not has_file(path):
            if not required:
                return {}
            raise CheckpointError(
                f"{self.folder} has no {name}; "
                + anew(self.folder, "give a folder with config.json and *.safetensors, or a GGUF file"),
                field=name,
            )
        try:
            value = json.loads(path.read_text("utf-8"), object_hook=_untag)
        except (ValueError, OSError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read as JSON ({error}); {anew(self.folder)}", field=name
            ) from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} must hold a JSON object; {anew(self.folder)}", field=name)
        return value

    def _explain_absence(self) -> NoReturn:
        found = sorted(path.name for path in self.folder.iterdir())
        if stray := [name for name in found if name.endswith(".safetensors")]:
            raise CheckpointError(
                f"{self.folder} holds {few(stray)} but neither {SINGLE} nor {INDEX}; "
                + anew(self.folder, f"download the index, or rename a single file to {SINGLE}"),
                field=INDEX,
            )
        if pickles := [name for name in found if name.endswith(_PICKLES)]:
            raise CheckpointError(
                f"{self.folder} holds only pickles ({few(pickles)}), and opening a pickle runs its code; "
                "convert them to safetensors (where you trust them: torch.load with weights_only=True, then "
                "safetensors.torch.save_file)",
                field=pickles[0],
            )
        raise CheckpointError(
            f"{self.folder} holds no weights: "
            + anew(self.folder, f"expected {SINGLE}, or {INDEX} and its shards"),
            field=SINGLE,
        )

    def _weight_map(self) -> dict[str, str]:
        entries = self._json(INDEX, required=True).get("weight_map")
        if not isinstance(entries, dict) or not entries:
            raise CheckpointError(
                f"{self.folder / INDEX} has no weight_map; {anew(self.folder)}", field=INDEX
            )
        for file in entries.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{self.folder / INDEX} names {file!r}, which is not a file of this folder", field=INDEX
                )
        return entries

    def _open_shards(self) -> None:
        promised = self._weight_map()
        held = {(file, name) for file in sorted(set(promised.values())) for name in self._open(file)}
        if absent := sorted(name for name, file in promised.items() if (file, name) not in held):
            raise CheckpointError(
                f"{self.folder / INDEX} promises {few(absent)} in {promised[absent[0]]}, which lacks it; "
                + anew(self.folder, "index and shards are of different downloads: fetch both again"),
                field=absent[0],
            )
        self._file_of.update(promised)

    def _open(self, file: str) -> list[str]:
        path = self.folder / file
        if not os.path.isfile(path):
            raise CheckpointError(
                f"{self.folder / INDEX} names {short(file)}, which is not there; "
                + anew(self.folder, "download the missing shard"),
                field=file,
            )
        try:
            opened = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not whole: {_damage(path, error)}", field=file) from error
        except RuntimeError as error:  # torch's, if the system refuses the mapping
            raise CheckpointError(
                f"{path} cannot be mapped ({error}); free memory, allow overcommitment "
                "(vm.overcommit_memory=1), or save the model in smaller shards",
                field=file,
            ) from error
        return self._hold(file, opened)

    def _hold(self, file: str, opened: Any) -> list[str]:
        names: list[str] = opened.keys()
        self._files[file] = opened
        self._file_of.update(dict.fromkeys(names, file))
        return names

    def names(self) -> Iterator[str]:
        """Yield every tensor's name as in the files."""
        yield from self._file_of

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def info(self, name: str) -> TensorInfo:
        """Return shape and type from the file's header, without reading the tensor."""
        if name not in self._infos:
            entry = self._files[self._file_of[name]].get_slice(name)
            stored = entry.stored if isinstance(entry, Header) else None
            self._infos[name] = TensorInfo(tuple(entry.get_shape()), entry.get_dtype(), stored)
        return self._infos[name]

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the file, which differs in GGUF; an absent tensor has the given one."""
        file = self._files.get(self._file_of.get(name, ""))
        return file.stored_name(name) if isinstance(file, GgufTensors) else name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's stored dtype."""
        stored = self.info(name).dtype
        if stored not in _DTYPES:
            raise CheckpointError(f"{name} is stored as {stored}, which specdec does not read", field=name)
        return _DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        """Return a view of the mapped file: copy it to keep it, and never write to it."""
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def copy(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor that owns its memory; GGUF tensors are unpacked and not copied again."""
        file = self._files[self._file_of[name]]
        if isinstance(file, GgufTensors):
            return file.get_tensor(name, dtype or torch.float32).to(device, dtype)
        return self.tensor(name).to(device, dtype, copy=True)


def _untag(value: dict[str, Any]) -> Any:
    return _TAGGED.get(value["__float__"], value) if value.keys() == {"__float__"} else value


def few(names: list[str]) -> str:
    """Format a list of names on one line, shortened and limited to the first three."""
    shown = ", ".join(textwrap.shorten(name, 240, placeholder="…") for name in names[:3])
    return f"{shown} … and {len(names) - 3} more" if len(names) > 3 else shown


def _damage(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            return "it is a Git LFS pointer, not the weights; run git lfs pull, or use hf download"
    return f"{error} ({path.stat().st_size} bytes on disk); {anew(path.parent)}"
