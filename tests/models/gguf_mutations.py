"""Change one field or tensor of a GGUF file, and write it again with the package gguf."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from specdec.models.fields import Fields

FIELDS = (
    *("general.architecture", "general.alignment", "general.sampling.temp", "split.count"),
    *("tokenizer.ggml.model", "tokenizer.chat_template"),
)
"""Fields that are read from the metadata directly."""
VALUES: Mapping[str, Any] = {
    **{"UINT32": (0, 1, 3, 33, 2**31, 2**32 - 1), "INT32": (-1,), "UINT64": (2**63,), "BOOL": (True,)},
    **{"FLOAT32": (0.0, -0.5, 2.5, math.nan, math.inf), "STRING": ("", "x")},
}
"""Single values by their type; arrays of one to five of them are written too."""
TENSORS = (
    "rope_freqs.weight",
    "blk.0.attn_output.scale",
    "blk.0.ffn_down_exps.scale",
    "blk.0.unknown.weight",
)
"""Tensors to add to a file."""
SHAPES: tuple[Callable[[NDArray[Any]], NDArray[Any]], ...] = (
    lambda own: own.reshape(-1),
    lambda own: own[None],
    lambda own: own[..., None],
    lambda own: own.T,
    lambda own: own[:1],
    lambda own: own[:-1] if len(own) > 1 else own[:1].repeat(3, 0),
    lambda own: np.concatenate([own, own], axis=-1),
    lambda own: own[..., : -(-own.shape[-1] // 2)],
    lambda own: own.astype(np.float16),
    lambda own: own.astype(np.int32),
)


class GgufContents(NamedTuple):
    """The fields, each with its types, and the tensors of a file without quantised ones."""

    fields: dict[str, tuple[Any, Any, Any]]
    tensors: dict[str, NDArray[Any]]

    @staticmethod
    def read(path: Path) -> "GgufContents":
        import gguf

        reader = gguf.GGUFReader(path)
        fields = {
            name: (own.contents(), own.types[0], own.types[-1] if len(own.types) > 1 else None)
            for name, own in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        return GgufContents(fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors})

    def write(self, path: Path) -> None:
        import gguf

        writer = gguf.GGUFWriter(path, "unused")
        writer.kv_data[0].clear()
        for name, own in self.fields.items():
            writer.add_key_value(name, *own)
        for name, data in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def mutate(self, rng: random.Random, known: set[str]) -> tuple["GgufContents", str]:
        """Return the contents with one change, and a description of it."""
        import gguf

        kinds, fields, tensors = gguf.GGUFValueType, dict(self.fields), dict(self.tensors)
        if tensors and rng.random() < 0.3:
            name = rng.choice(sorted({*tensors, *TENSORS}))
            data = tensors.get(name, np.ones(4, np.float32))
            tensors[name] = changed = rng.choice(SHAPES)(data)
            if rng.random() < 0.1:
                del tensors[name]
            return GgufContents(fields, tensors), f"{name}: {data.shape} to {changed.dtype} {changed.shape}"
        name, kind = rng.choice(sorted({*fields, *FIELDS, *known})), rng.choice(sorted(VALUES))
        value = rng.choice(VALUES[kind])
        if rng.random() < 0.4:
            value = [value] * rng.randint(1, 5)
            fields[name] = value, kinds.ARRAY, kinds[kind]
        else:
            fields[name] = value, kinds[kind], None
        return GgufContents(fields, tensors), f"{name}: {value!r} ({kind})"


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Record the names of the fields that are asked for, present or not."""
    known, contains = set[str](), Fields.__contains__

    def ask(self: Fields, name: str) -> bool:
        if "." in name:
            known.add(name)
        return contains(self, name)

    with mock.patch.object(Fields, "__contains__", ask):
        yield known


def refusals(path: Path, load: Callable[[Path], Any], count: int, seed: str) -> float:
    """Load mutants of a file; return the share that is refused. Any other exception is raised."""
    from specdec.errors import CheckpointError

    with recorded() as known:
        load(path)
    own, rng, refused = GgufContents.read(path), random.Random(seed), 0
    for _ in range(count):
        mutant, change = own.mutate(rng, known)
        mutant.write(path)
        try:
            load(path)
        except CheckpointError:
            refused += 1
        except BaseException as error:
            error.add_note(f"after the change of {change}")
            raise
    return refused / count
