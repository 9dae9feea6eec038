"""Parse a GGUF file's metadata and tensor table. Everything is checked before use."""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specdec.errors import CheckpointError
from specdec.models.gguf.names import MAGIC
from specdec.models.gguf.storage_types import TYPES, UNREAD, GgufType

OTHERWISE = "take another file, or the checkpoint that it was made from"
"""Remedy for an intact file that specdec does not support."""
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4
MOST_STRINGS = 1 << 22
"""Maximum strings in all arrays, which are parsed one by one; vocabularies have 250,000."""
MOST_BYTES = 1 << 27
"""Maximum bytes of the header's names, strings and numeric arrays, or of one array of strings."""

_SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i"},
    **{6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
_STRING, _ARRAY = 8, 9


class TruncatedError(CheckpointError):
    """The file ends within its header, or claims more items than fit."""


class GgufTensor(NamedTuple):
    """A tensor's location and type."""

    shape: tuple[int, ...]
    kind: GgufType
    offset: int
    """From the start of the file."""
    file: mmap.mmap
    factor: float = 1.0
    """Scale of the whole tensor (NVFP4)."""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) // self.kind.block_size * self.kind.block_bytes

    @property
    def data(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The tensor's bytes, a view of the mapped file."""
        return np.frombuffer(self.file, np.uint8, self.bytes, self.offset)


class GgufStrings(NamedTuple):
    """An array of strings, decoded on demand: vocabularies have 250,000."""

    offset: int
    """From the start of the file."""
    length: int


class GgufFile:
    """One mapped file. Metadata strings and numbers are Python's, numeric arrays numpy's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); download it again", field="model"
            ) from error
        self._at, self._left, self._strings_left = 0, MOST_BYTES, MOST_STRINGS
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, GgufTensor] = {}
        self._read()

    def strings(self, field: str) -> tuple[str, ...]:
        """Decode an array of strings; empty if the field is absent or of another type."""
        found = self.metadata.get(field)
        if not isinstance(found, GgufStrings):
            return ()
        self._at, self._left = found.offset, MOST_BYTES
        return tuple(self._string(field) for _ in range(found.length))

    def _read(self) -> None:
        if self._take(4, "its first bytes") != MAGIC:
            self._refuse("model", "it does not begin as a GGUF file does")
        version = self._scalar(4, "version")
        if version not in VERSIONS:
            known = " and ".join(map(str, VERSIONS))
            self._refuse("version", f"its version is {version}; specdec reads {known}", OTHERWISE)
        tensors, fields = self._count("tensors", least=20), self._count("fields", least=13)
        for _ in range(fields):
            name = self._string("a field's name")
            if name in self.metadata:
                self._refuse(name, f"it has the field {name} twice")
            self.metadata[name] = self._value(self._scalar(4, name), name)
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._refuse("general.alignment", "general.alignment must be a power of two")
        found = list(self._tensors(tensors))
        start = -(-self._at // alignment) * alignment
        for name, entry in found:
            if name in self.entries:
                self._refuse(name, f"it has the tensor {name} twice")
            entry = entry._replace(offset=start + entry.offset)
            if entry.offset + entry.bytes > len(self._data):
                self._refuse(name, f"{name} extends past the end of the file")
            self.entries[name] = entry
        if sum(entry.bytes for entry in self.entries.values()) > len(self._data):
            self._refuse("model", "its tensors overlap")

    def _tensors(self, count: int) -> Iterator[tuple[str, GgufTensor]]:
        for _ in range(count):
            name = self._string("a tensor's name")
            dimensions = self._scalar(4, name)
            if not 0 < dimensions <= MOST_DIMENSIONS:
                self._refuse(name, f"{name} has {dimensions} dimensions, and may have {MOST_DIMENSIONS}")
            shape = tuple(self._scalar(10, name) for _ in range(dimensions))[::-1]
            number, offset = self._scalar(4, name), self._scalar(10, name)
            kind = TYPES.get(number)
            if kind is None:
                known = UNREAD.get(number, f"type {number}, which llama.cpp does not have")
                names = ", ".join(own.name for own in TYPES.values())
                self._refuse(name, f"{name} is stored as {known}; specdec reads {names}", OTHERWISE)
            if 0 in shape or math.prod(shape) >= 1 << 63 or shape[-1] % kind.block_size:
                self._refuse(name, f"{name} has the shape {list(shape)}, which {kind.name} cannot have")
            yield name, GgufTensor(shape, kind, offset, self._data)

    def _value(self, kind: int, name: str) -> Any:
        if kind == _STRING:
            return self._string(name)
        if kind != _ARRAY:
            return self._scalar(kind, name)
        of = self._scalar(4, name)
        if of == _STRING:
            count, start = self._count(name, least=8), self._at
            if count > self._strings_left:
                self._refuse(name, f"{name} has {count:,} strings, and may have {self._strings_left:,}")
            self._strings_left -= count
            self._at = self._skip(count, name)
            return GgufStrings(start, count)
        if of not in _SCALARS:
            self._refuse(name, f"{name} is an array of arrays, or of an unknown type ({of})")
        form = np.dtype(_SCALARS[of])
        count = self._count(name, least=form.itemsize)
        return np.frombuffer(self._take(count * form.itemsize, name), form)

    def _skip(self, count: int, name: str) -> int:
        """Return the end offset of an array of strings."""
        end, length_at = self._at, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end += 8 + length_at(self._data, end)[0]
        except (struct.error, OverflowError):
            end = len(self._data) + 1
        if end > len(self._data):
            self._refuse(name, f"it ends in the middle of {name}", kind=TruncatedError)
        return end

    def _count(self, field: str, *, least: int) -> int:
        """Read a count of items of at least `least` bytes each; refuse more than fit in the file."""
        count: int = self._scalar(10, field)
        if count > (len(self._data) - self._at) // least:
            self._refuse(
                field,
                f"{field} says that {count:,} items follow, and the file is too short for them",
                kind=TruncatedError,
            )
        return count

    def _string(self, name: str) -> str:
        try:
            return self._take(self._count(name, least=1), name).decode()
        except UnicodeDecodeError:
            self._refuse(name, f"{name} is not UTF-8")

    def _scalar(self, kind: int, name: str) -> Any:
        if kind not in _SCALARS:
            self._refuse(name, f"{name} is of an unknown type ({kind})")
        form = _SCALARS[kind]
        return struct.unpack(form, self._take(struct.calcsize(form), name))[0]

    def _take(self, count: int, name: str) -> bytes:
        if count > self._left:
            self._refuse(name, f"{name} has {count:,} bytes, and may have {self._left:,}")
        self._left -= count
        taken = self._data[self._at : self._at + count]
        if len(taken) < count:
            self._refuse("model", f"it ends in the middle of {name}", kind=TruncatedError)
        self._at += count
        return taken

    def _refuse(
        self,
        field: str,
        why: str,
        remedy: str = "download it again",
        kind: type[CheckpointError] = CheckpointError,
    ) -> NoReturn:
        shown = f"{self.path.name}: {why}"
        raise kind(f"{shown[:400]}; {remedy}", field=field[:200] or "model")
