"""Operations to time with random inputs: the parts shared by all kernel benchmarks."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.table import Kernels, load_kernels
from specdec.models import spec
from tools.bench.timing import Call

MOST_SETS = 32
SAMPLED = 64
"""Rows of a weight whose products are compared."""
NOISE = 1_048_573
"""Length of the noise strip that inputs are cut from; a prime, so that rows differ."""
TINY = 1e-3
"""Errors are relative to a row's norm, or to this share of the largest norm if greater."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation with its inputs. `calls` run it on the buffer sets; `error` checks the first."""

    bytes: int
    calls: Sequence[Call]
    error: Callable[[], float]
    """Compare the first set with the reference on sampled rows; return the largest relative error of a
    row."""
    asks: bool = False
    """Whether it reads values on the host, which a CUDA graph cannot capture."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem that is not built yet."""

    operation: str
    shape: str
    detail: str
    batch: int
    window: int
    needs: int
    """Bytes of memory."""
    build: Callable[[], Problem]
    backing: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """Device, kernels and dtype for building and running problems."""

    kernels: Kernels
    reference: Kernels
    device: torch.device
    dtype: torch.dtype
    cold_bytes: int
    """Bytes to touch before a set of buffers is used again."""
    noise: Tensor

    @classmethod
    def of(cls, kernels: str, device: torch.device, dtype: torch.dtype, cold_bytes: int) -> "Bench":
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(NOISE, generator=generator).to(device)
        return cls(load_kernels(kernels), load_kernels("reference"), device, dtype, cold_bytes, noise)

    def draw(
        self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0, scale: float = 1.0
    ) -> Tensor:
        """Return a tensor of normal noise, cut from the strip."""
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype or self.dtype, device=self.device)
        done, start = 0, seed * 7919 % NOISE
        while done < len(flat):
            piece = self.noise[start : start + len(flat) - done]
            torch.mul(piece, scale, out=flat[done : done + len(piece)])
            done, start = done + len(piece), 0
        return flat.view(shape)

    def sets(self, num_bytes: int) -> int:
        """Return how many sets of buffers keep their weights and states out of the caches."""
        return max(1, min(MOST_SETS, -(-self.cold_bytes // max(num_bytes, 1))))


@dataclass(frozen=True, slots=True)
class Sizes:
    """One shape at one load."""

    name: str
    network: spec.NetworkSpec
    batch: int
    window: int
    context: int

    @property
    def tokens(self) -> int:
        return self.batch * self.window

    def plan(self, operation: str, detail: str, needs: int, build: Callable[[], Problem]) -> Planned:
        return Planned(operation, self.name, detail, self.batch, self.window, needs, build)


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row; infinite for NaN."""
    wide = (x.detach().cpu().double().flatten(1) for x in (actual, expected))
    found_RN, right_RN = wide
    norm_R = right_RN.norm(dim=1)
    error_R = (found_RN - right_RN).norm(dim=1) / norm_R.clamp(min=TINY * float(norm_R.max()) + 1e-30)
    worst = float(error_R.max())
    return worst if worst == worst else float("inf")


def sample(count: int) -> list[int]:
    """Choose the rows to compare: the first and the last."""
    return sorted({0, count - 1})


def on_cpu(value: Any) -> Any:
    """Copy the tensors within a value to the host."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case tuple():
            parts = [on_cpu(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            held = {field.name: on_cpu(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return dataclasses.replace(value, **held)
        case _:
            return value


def by_token(
    bench: Bench,
    size: int,
    run: Callable[..., Tensor],
    inputs: Sequence[Sequence[Tensor]],
    *constant: Any,
) -> Problem:
    """Build a problem from a function of packed tokens: `run(kernels, *tokens, *constant)` for each set."""
    rows = sample(len(inputs[0][0]))

    def error() -> float:
        excerpt = [on_cpu(x_T[rows]) for x_T in inputs[0]]
        # Some work in place, so the excerpt is taken first.
        found = run(bench.kernels, *inputs[0], *constant)[rows]
        return row_error(found, run(bench.reference, *excerpt, *on_cpu(tuple(constant))))

    calls = [partial(run, bench.kernels, *own, *constant) for own in inputs]
    return Problem(size, calls, error)
