"""Sources of tensors by our names, including random ones for benchmarks."""

import math
import zlib
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.linear.matrix import Matrix
from specdec.models.formats import WeightFormat
from specdec.models.layouts import Shape

# A prime, so that rows of a tensor longer than the noise differ.
_NOISE = 4_194_301


class Weights(Protocol):
    """Hands out each tensor once, in `dtype` (None: the engine's), on the engine's device.

    `matrix` is for large tensors that may be quantised; `take` never quantises. `output` converts an already
    loaded tensor to the output matrix, which may also be the embedding.
    """

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor: ...

    def matrix(self, name: str, shape: Shape) -> Matrix: ...

    def output(self, name: str, weight_ND: Tensor) -> Matrix: ...

    def has(self, name: str) -> bool: ...

    def within(self, prefix: str) -> "Weights": ...


class Scoped:
    """A view of the weights below one prefix."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Load a tensor named relative to the prefix."""
        return self._weights.take(f"{self._prefix}.{name}", shape, dtype)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Load a matrix named relative to the prefix."""
        return self._weights.matrix(f"{self._prefix}.{name}", shape)

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        """Convert the output matrix, named relative to the prefix."""
        return self._weights.output(f"{self._prefix}.{name}", weight_ND)

    def has(self, name: str) -> bool:
        """Return whether the tensor is present."""
        return self._weights.has(f"{self._prefix}.{name}")

    def within(self, prefix: str) -> Weights:
        """Extend the prefix."""
        return Scoped(self._weights, f"{self._prefix}.{prefix}")


class RandomWeights:
    """Draws random tensors at a scale that keeps activations near one.

    A tensor depends only on the seed, its name and its shape. All are cut from one strip of normal noise at
    offsets determined by the names, so a large model is generated at the speed of a copy.
    """

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        norm_offset: float = 0.0,
        quantize: WeightFormat | None = None,
    ) -> None:
        """Prepare the noise; norms multiply by one, given the offset that the network adds to weights.

        With `quantize` each large matrix is quantised right after it is drawn, before the next one.
        """
        self._seed, self._dtype, self._device = seed, dtype, torch.device(device)
        self._norm_offset, self._quantize = norm_offset, quantize
        generator = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(_NOISE, generator=generator).to(self._device)

    def take(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name."""
        dtype = dtype or self._dtype
        return self._draw(name, shape, dtype).to(dtype)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Return the matrix of this name, quantised if requested."""
        drawn = self.take(name, shape)
        return self._quantize.quantise(drawn) if self._quantize else drawn

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        """Quantise the output matrix if requested."""
        form = self._quantize and self._quantize.output
        return form.quantise(weight_ND) if form else weight_ND

    @property
    def unused(self) -> bool:
        """Return False: every tensor is used."""
        return False

    def has(self, name: str) -> bool:
        """Return True: any tensor can be drawn."""
        return True

    def within(self, prefix: str) -> Weights:
        """Return a view of the tensors below a prefix."""
        return Scoped(self, prefix)

    def finish(self) -> None:
        """Do nothing: no tensor can be missing."""

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
        """Cut a tensor out of the strip, wrapping around as needed."""
        start = zlib.crc32(f"{self._seed} {name}".encode()) % _NOISE
        flat = torch.empty(math.prod(shape), dtype=dtype, device=self._device)
        done = 0
        while done < len(flat):
            piece = self._noise[start : start + len(flat) - done]
            torch.mul(piece, scale, out=flat[done : done + len(piece)])
            done, start = done + len(piece), 0
        return flat.view(shape)
