"""Tensors by our names, read from a checkpoint through a family's layout."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.config.folders import anew
from specdec.errors import CheckpointError
from specdec.kernels.linear import fp8
from specdec.kernels.linear.fp8 import Fp8
from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix, widen
from specdec.models.checkpoint import Checkpoint, TensorInfo, few
from specdec.models.formats import QuantisationConfig, WeightFormat
from specdec.models.gguf.file import OTHERWISE
from specdec.models.layouts import CheckpointLayout, Shape, TensorSource
from specdec.models.packed.base import Unfit
from specdec.models.sizes import fields_behind
from specdec.models.tensors import Tensors
from specdec.models.weights import Scoped, Weights

logger = logging.getLogger(__name__)

_READABLE = ("F64", "F32", "F16", "BF16")

_FP8 = "F8_E4M3"
_EMBEDDING, _HEAD = "embed.weight", "head.weight"


class CheckpointWeights:
    """Reads tensors from a checkpoint through a family's layout.

    Missing or misshapen tensors are noted and replaced by zeros without memory, so that `finish` can report
    them all; after the first problem nothing more is read. With `headers_only` nothing is ever read: shapes
    are compared, and returned tensors have no elements.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: CheckpointLayout,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mtp: bool = False,
        announced: QuantisationConfig | None = None,
        quantize: WeightFormat | None = None,
        headers_only: bool = False,
        progress: bool | None = None,
    ) -> None:
        """Open the tensors; `progress` shows a bar, by default if stderr is a terminal.

        `announced` is the config's storage format of large matrices; others are quantised to `quantize`.
        """
        self._checkpoint, self._layout = checkpoint, layout
        self._dtype, self._device = dtype, torch.device(device)
        self._tensors = Tensors(checkpoint, announced)
        self._names = self._tensors.names
        self._prefix = layout.prefix(self._names)
        self._wanted = layout.wanted(self._names, mtp=mtp)
        self._read: set[str] = set()
        self._taken: set[str] = set()
        self._fp8_weights = announced is not None and announced.packed is None
        self.is_packed = announced is not None and announced.packed is not None
        self._quantize, self._headers_only = quantize, headers_only
        self._widened: dict[str, None] = {}
        self._missing: list[str] = []
        self._misshapen = [
            f"{name} is stored as integers, but config.json leaves it out" for name in self._tensors.left_out
        ]
        total = sum(self._tensors.bytes(name) for name in self._wanted)
        hidden = None if progress is None else not progress
        self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=hidden)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor by our name, in its own memory; quantised ones are widened."""
        reader = _Reader(self, name, dtype or self._dtype, keep=False)
        taken = self._make(name, shape, reader)
        assert isinstance(taken, Tensor)
        self._widened |= reader.widened
        return taken

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Return a matrix by our name, in its own memory, quantised if stored or requested so."""
        reader = _Reader(self, name, self._dtype, keep=True)
        made = self._make(name, shape, reader)
        if isinstance(made, Integers):
            return made
        if self._quantize and not self.unused and (self._quantize.rounds_fp8 or not reader.widened):
            return self._quantize.quantise(made)
        self._widened |= reader.widened
        return made

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        """Quantise an output matrix if requested; if it is stored as integers, return these unchanged.

        A tied output uses the stored integers of the embedding.
        """
        if self.unused:
            return weight_ND
        source = self._source(name, 1) or (self._source(_EMBEDDING, 1) if name == _HEAD else None)
        if source and self._tensors.scheme(source.disk[0]):
            self._widened.pop(source.disk[0], None)
            reader = _Reader(self, name, self._dtype, keep=True)
            return source.recipe(reader, source.disk, tuple(weight_ND.shape))
        form = self._quantize and self._quantize.output
        return form.quantise(weight_ND) if form else weight_ND

    @property
    def count(self) -> int:
        """Number of tensors in the files."""
        return len(self._names)

    @property
    def failed(self) -> bool:
        """True after the first problem."""
        return bool(self._missing or self._misshapen)

    @property
    def unused(self) -> bool:
        """True if results are discarded: there is an error to report, or only headers are read."""
        return self.failed or self._headers_only

    def _make(self, name: str, shape: Shape, reader: "_Reader") -> Matrix:
        assert name not in self._taken, f"{name} was taken twice"
        self._taken.add(name)
        source = self._source(name, shape[0]) or next(self._layout.sources(name, self._prefix), None)
        assert source, f"no rule says where {name} lies"
        made = source.recipe(reader, source.disk, shape)
        return self.stand_in(shape, made.dtype) if self.unused else made

    def _source(self, name: str, experts: int) -> TensorSource | None:
        """Return a tensor's source in the files, or None."""
        sources = self._layout.sources(name, self._prefix)
        return next((source for source in sources if source.present(self._names, experts)), None)

    def height(self, disk: str) -> int | None:
        """Return the rows of a tensor in the files, or None if it is absent."""
        return self._checkpoint.shape(disk)[0] if disk in self._checkpoint else None

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor by our name (or its first expert)."""
        return self._source(name, 1) is not None

    def within(self, prefix: str) -> Weights:
        """Return a view of the tensors below a prefix."""
        return Scoped(self, prefix)

    def read(self, disk: str, shape: Shape, dtype: torch.dtype, ours: str) -> Matrix:
        """Copy one disk tensor, a source of `ours`, to the device, or note its problem."""
        if disk not in self._names:
            self._missing.append(f"{disk} {list(shape)}")
            return self.stand_in(shape, dtype)
        if self._tensors.scheme(disk):
            return self._read_packed(disk, shape, dtype)
        info = self._checkpoint.info(disk)
        readable = (*_READABLE, _FP8) if self._fp8_weights and len(shape) > 1 else _READABLE
        if info.shape != shape:
            fields = ", ".join(fields_behind(self._checkpoint.config, ours, info.shape, shape))
            by = f" ({fields})" if fields else ""
            self.note(f"{disk} is {list(info.shape)}, config.json makes it {list(shape)}{by}")
        elif info.dtype not in readable:
            self.note(
                f"{disk} is stored as {info.dtype}, specdec reads {', '.join(readable)}{self._hint(info)}"
            )
        elif info.dtype == _FP8:
            return self._read_fp8(disk, shape, dtype)
        return self._copy(disk, shape, dtype)

    def _read_packed(self, disk: str, shape: Shape, dtype: torch.dtype) -> Matrix:
        if disk not in self._read:
            self._missing += self._tensors.missing(disk, shape)
            self._misshapen += self._tensors.misshapen(disk, shape)
        if not self.unused:
            try:
                matrix = self._tensors.read(disk, shape, dtype, self._device)
            except Unfit as error:
                self.note(str(error))
            else:
                self._count(disk)
                return matrix
        self._read.add(disk)
        return self.stand_in(shape, dtype)

    def _read_fp8(self, disk: str, shape: Shape, dtype: torch.dtype) -> Matrix:
        """Copy the FP8 values and the scales of a matrix."""
        name, blocks = f"{disk}_scale_inv", fp8.block_shape(shape)
        numbers = self._copy(disk, shape, torch.float8_e4m3fn)
        if name not in self._names:
            self._missing.append(f"{name} {list(blocks)}, the scales of {disk}")
        elif (info := self._checkpoint.info(name)).shape != blocks:
            self.note(f"{name} is {list(info.shape)}, the blocks of {disk} make it {list(blocks)}")
        elif info.dtype not in _READABLE:
            self.note(f"{name} is stored as {info.dtype}, specdec reads {', '.join(_READABLE)}")
        scales = self._copy(name, blocks, torch.float32)
        if not self.unused and not bool(((scales > 0) & scales.isfinite()).all()):
            self.note(f"{name} holds scales that are not positive numbers")
        return self.stand_in(shape, dtype) if self.unused else Fp8(numbers, scales, dtype)

    def _copy(self, disk: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        if self.unused:
            self._read.add(disk)
            return self.stand_in(shape, dtype)
        tensor = self._checkpoint.copy(disk, self._device, dtype)
        self._count(disk)
        return tensor

    def _count(self, disk: str) -> None:
        """Mark a tensor as read, and advance the progress bar the first time."""
        if disk not in self._read:
            self._bar.update(self._tensors.bytes(disk))
        self._read.add(disk)

    def _hint(self, info: TensorInfo) -> str:
        unannounced = info.dtype == _FP8 and not self._fp8_weights
        return ", and config.json has no quantization_config that announces it" if unannounced else ""

    def note(self, problem: str) -> None:
        """Record a problem with a present tensor for `finish`."""
        self._misshapen.append(problem)

    def empty(self, shape: Shape, like: Matrix) -> Matrix:
        """Allocate a matrix that is assembled from several."""
        if isinstance(like, Integers):
            return like.empty(shape)
        if isinstance(like, Fp8):
            return fp8.empty(shape, like.dtype, self._device)
        return torch.empty(shape, dtype=like.dtype, device=self._device)

    def stand_in(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return zeros without memory, or for headers alone an empty tensor of as many dimensions."""
        if self._headers_only:
            return torch.empty((0,) * len(shape), dtype=dtype)
        return torch.zeros((), dtype=dtype, device=self._device).expand(shape)

    def finish(self) -> None:
        """Close the progress bar and raise one error that names every faulty tensor."""
        self._bar.close()
        unread = sorted(self._wanted - self._read)
        unexpected = [name for name in unread if not self._tensors.is_idle_bias(name)]
        found = {"missing": self._missing, "misshapen": self._misshapen, "unexpected": unexpected}
        kinds = {kind: [self._as_stored(line) for line in lines] for kind, lines in found.items()}
        if any(kinds.values()):
            raise CheckpointError(self._complaint(kinds), field=_first_name(kinds.values()))
        if self._widened:
            shown = str(self._dtype).removeprefix("torch."), few(list(self._widened))
            logger.warning(
                "not quantised but stored in %s: %s, as their blocks do not divide or they must be exact",
                *shown,
            )

    def _as_stored(self, line: str) -> str:
        """Name a GGUF file's tensor and metadata in a problem that begins with a checkpoint's name."""
        name, space, rest = line.partition(" ")
        if self._checkpoint.gguf_file:
            rest = rest.replace("config.json makes", "its metadata make")
        return self._checkpoint.stored_name(name) + space + rest

    def _complaint(self, kinds: dict[str, list[str]]) -> str:
        found = "; ".join(f"{len(lines)} {kind}: {few(lines)}" for kind, lines in kinds.items() if lines)
        if path := self._checkpoint.gguf_file:
            return f"{path}: tensors are not as its metadata describe them: {found}; {OTHERWISE}"
        return (
            f"{self._checkpoint.folder}: tensors are not as config.json describes them: {found}; check that "
            "config.json and the safetensors belong together, or "
            f"{anew(self._checkpoint.folder, 'download both again')}"
        )


class _Reader:
    """Binds name and dtype for the recipe that makes one tensor."""

    def __init__(self, weights: CheckpointWeights, name: str, dtype: torch.dtype, *, keep: bool) -> None:
        self._weights, self._name, self._dtype, self._keep = weights, name, dtype, keep
        self.widened: dict[str, None] = {}
        """Disk names of quantised tensors that were widened."""

    @property
    def count(self) -> int:
        return self._weights.count

    @property
    def unused(self) -> bool:
        return self._weights.unused

    def read(self, disk: str, shape: Shape) -> Matrix:
        matrix = self._weights.read(disk, shape, self._dtype, self._name)
        return matrix if self._keep else self.widen(matrix, disk)

    def height(self, disk: str) -> int | None:
        return self._weights.height(disk)

    def widen(self, matrix: Matrix, disk: str) -> Tensor:
        if isinstance(matrix, Tensor):
            return matrix
        self.widened[disk] = None
        return widen(matrix)

    def empty(self, shape: Shape, like: Matrix) -> Matrix:
        return self._weights.empty(shape, like)

    def unlike(self, disk: str) -> None:
        if not self._weights.unused:
            self._weights.note(
                f"{disk} is not stored as the experts before it are, of which some have fewer bits"
            )


def _first_name(found: Iterable[list[str]]) -> str:
    return next(lines[0].split(" ", 1)[0] for lines in found if lines)
