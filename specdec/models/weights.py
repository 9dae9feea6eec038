"""Tensors by our names: read from a checkpoint, or drawn at random for a model that is only a shape."""

import math
import zlib
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint, anew
from specdec.models.layouts import Layout, Shape

_MOST_PROBLEMS = 20

_READABLE = ("F64", "F32", "F16", "BF16")

# A prime, so that the rows of a tensor longer than the noise differ.
_NOISE = 4_194_301


class Weights(Protocol):
    """Hand out each tensor once, in `dtype` (None: the engine's), on the engine's device."""

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor: ...

    def has(self, name: str) -> bool: ...

    def within(self, prefix: str) -> "Weights": ...


class Scoped:
    """See weights below one prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Take a tensor named relative to the prefix."""
        return self._weights.take(f"{self._prefix}.{name}", shape, dtype)

    def has(self, name: str) -> bool:
        """Tell whether the tensor is there."""
        return self._weights.has(f"{self._prefix}.{name}")

    def within(self, prefix: str) -> Weights:
        """Narrow the prefix."""
        return Scoped(self._weights, f"{self._prefix}.{prefix}")


class CheckpointWeights:
    """Read tensors from a checkpoint through a family's layout.

    What is missing or misshapen is noted and stood in for by zeros without memory, so that `finish`
    can name everything at once; from the first problem on nothing more is read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mtp: bool = False,
        progress: bool | None = None,
    ) -> None:
        """Show progress where `progress` says so; None: where stderr is a terminal."""
        self._checkpoint, self._layout = checkpoint, layout
        self._dtype, self._device = dtype, torch.device(device)
        self._names = frozenset(checkpoint.names())
        self._prefix = layout.prefix(self._names)
        self._wanted = layout.wanted(self._names, mtp=mtp)
        self._read: set[str] = set()
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        total = sum(checkpoint.info(name).bytes for name in self._wanted)
        hidden = None if progress is None else not progress
        self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, disable=hidden)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Return a canonical tensor, in memory of its own."""
        assert name not in self._taken, f"{name} was taken twice"
        self._taken.add(name)
        sources = list(self._layout.sources(name, self._prefix))
        assert sources, f"no rule says where {name} lies"
        source = next((s for s in sources if s.present(self._names, shape[0])), sources[0])
        tensor = source.recipe(_Reader(self, dtype or self._dtype), source.disk, shape)
        return self._stand_in(shape, tensor.dtype) if self._missing or self._misshapen else tensor

    def has(self, name: str) -> bool:
        """Tell whether the checkpoint holds a canonical tensor (or its first expert)."""
        return any(s.present(self._names, 1) for s in self._layout.sources(name, self._prefix))

    def within(self, prefix: str) -> Weights:
        """See the tensors below a prefix."""
        return Scoped(self, prefix)

    def read(self, disk: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Copy one disk tensor to the device, or note what is wrong with it."""
        if disk not in self._names:
            self._missing.append(f"{disk} {list(shape)}")
            return self._stand_in(shape, dtype)
        info, again = self._checkpoint.info(disk), disk in self._read
        self._read.add(disk)
        if info.shape != shape:
            self._misshapen.append(f"{disk} is {list(info.shape)}, config.json makes it {list(shape)}")
        elif info.dtype not in _READABLE:
            self._misshapen.append(f"{disk} is stored as {info.dtype}, specdec reads {', '.join(_READABLE)}")
        if self._missing or self._misshapen:
            return self._stand_in(shape, dtype)
        tensor = self._checkpoint.tensor(disk).to(self._device, dtype, copy=True)
        if not again:
            self._bar.update(info.bytes)
        return tensor

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return room for a tensor that is put together from several."""
        if self._missing or self._misshapen:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _stand_in(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self._device).expand(shape)

    def finish(self) -> None:
        """Close the progress bar and raise one error that names every tensor at fault."""
        self._bar.close()
        unexpected = sorted(self._wanted - self._read)
        kinds = {"missing": self._missing, "misshapen": self._misshapen, "unexpected": unexpected}
        if any(kinds.values()):
            raise CheckpointError(self._complaint(kinds), field=_first_name(kinds.values()))

    def _complaint(self, kinds: dict[str, list[str]]) -> str:
        counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items() if found)
        lines = [f"  {kind}: {line}" for kind, found in kinds.items() for line in found]
        if len(lines) > _MOST_PROBLEMS:
            lines[_MOST_PROBLEMS:] = [f"  … and {len(lines) - _MOST_PROBLEMS} more"]
        return "\n".join(
            [
                f"{self._checkpoint.folder}: tensors are not as config.json describes them ({counts}):",
                *lines,
                "Check that config.json and the safetensors belong together, or "
                f"{anew(self._checkpoint.folder, 'download both again')}.",
            ]
        )


class _Reader:
    """Bind a target type for the recipe that is making one tensor."""

    def __init__(self, weights: CheckpointWeights, dtype: torch.dtype) -> None:
        self._weights = weights
        self._dtype = dtype

    def read(self, disk: str, shape: Shape) -> Tensor:
        return self._weights.read(disk, shape, self._dtype)

    def empty(self, shape: Shape) -> Tensor:
        return self._weights.empty(shape, self._dtype)


def _first_name(found: Iterable[list[str]]) -> str:
    return next(lines[0].split(" ", 1)[0] for lines in found if lines)


class RandomWeights:
    """Draw each tensor by its name, at a scale that keeps activations near one.

    A tensor depends on the seed, its name and its shape only. All of them are cut from one strip of
    normal noise at places that the names choose, so that a large model is made at the speed of a copy.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        norm_offset: float = 0.0,
    ) -> None:
        """Make norms multiply by one, given the offset that the network adds to their weights."""
        self._seed, self._dtype, self._device = seed, dtype, torch.device(device)
        self._norm_offset = norm_offset
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(_NOISE, generator=generator).to(self._device)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name."""
        dtype = dtype or self._dtype
        return self._draw(name, shape, dtype).to(dtype)

    def has(self, name: str) -> bool:
        """Any tensor can be drawn."""
        return True

    def within(self, prefix: str) -> Weights:
        """Draw the tensors below a prefix."""
        return Scoped(self, prefix)

    def finish(self) -> None:
        """Agree: nothing can be missing."""

    def _draw(self, name: str, shape: Shape, dtype: torch.dtype) -> Tensor:
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "A_log":
            return torch.log(1 + 15 * self._uniform(name, shape))
        if leaf == "dt_bias":
            # The inverse of softplus at steps spread evenly over the decades from 0.001 to 0.1.
            step = torch.exp(math.log(1e-3) + math.log(1e2) * self._uniform(name, shape))
            return step + torch.log(-torch.expm1(-step))
        if leaf in ("bias", "correction"):
            return torch.zeros(shape, device=self._device)
        if leaf == "D" or name.endswith("mixer.norm.weight"):
            return torch.ones(shape, device=self._device)
        if len(shape) == 1:
            return torch.full(shape, 1 - self._norm_offset, device=self._device)
        return self._normal(name, shape, shape[-1] ** -0.5, dtype)

    def _uniform(self, name: str, shape: Shape) -> Tensor:
        even: Tensor = torch.special.ndtr(self._normal(name, shape, 1.0))
        return even.clamp(1e-6, 1 - 1e-6)

    def _normal(self, name: str, shape: Shape, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Cut a tensor out of the strip, going around as often as needed."""
        start = zlib.crc32(f"{self._seed} {name}".encode()) % _NOISE
        flat = torch.empty(math.prod(shape), dtype=dtype, device=self._device)
        done = 0
        while done < len(flat):
            piece = self._noise[start : start + len(flat) - done]
            torch.mul(piece, scale, out=flat[done : done + len(piece)])
            done, start = done + len(piece), 0
        return flat.view(shape)
