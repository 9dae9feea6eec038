"""Engines of real shapes on the CPU that record kernel launches, with what Triton would compile.

Runs in a separate process: under the other tests' interpreter nothing is compiled. Weights are zeros that
take no memory, as they are never written. Operations that steer the host (tokens, walks, trees) run on the
CPU, so that requests proceed as on a GPU, to their ends.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.core.device.graphs import Graphs
from specdec.core.engine_core import EngineCore
from specdec.core.outputs import Delta
from specdec.kernels.linear import triton_integers
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.table import OPERATIONS, Kernels, load_kernels, replaced
from specdec.models import spec
from specdec.models.formats import WeightFormat
from specdec.models.weights import Scoped, Weights
from specdec.setup import build
from specdec.setup.build import LoadedModel, build_random
from specdec.setup.precompile import precompile

TARGET = GPUTarget("cuda", 90, 32)
STEERING = {
    *("relations", "walk", "accept_at_rates", "promote", "children", "frontier", "prune"),
    *("sample", "topk_with_noise"),
}
"""Operations that decide the next tokens and trees."""


LARGE = 1 << 26


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel specialisation, as the JIT would compile it."""

    kernel: JITFunction
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Any

    @property
    def folder(self) -> str:
        """Return the folder of the kernel's file."""
        module: str = self.kernel.__module__
        return module.split(".")[-2]

    @property
    def arguments(self) -> frozenset[tuple[str, str]]:
        """Return the names and types of the arguments that are not constants."""
        return frozenset((name, kind) for name, kind in self.signature.items() if kind != "constexpr")

    def knows(self, name: str) -> bool:
        """Return whether a constant is set."""
        names = self.kernel.arg_names
        return any(names[at] == name and value is not None for (at, *_), value in self.constants.items())

    def __str__(self) -> str:
        """Format the kernel and its specialisation."""
        names = self.kernel.arg_names
        known = " ".join(f"{names[at]}={value}" for (at, *_), value in self.constants.items())
        types = " ".join(f"{name}:{kind}" for name, kind in self.signature.items() if kind != "constexpr")
        where = f"{self.kernel.__module__}.{self.kernel.__name__}"
        return f"{where} {known} {types} warps={self.options.num_warps}"


class _Driver:
    """A fake H100 driver."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launches:
    """Record every launch without running it."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[str, str, str], Compiled] = {}
        self.count = 0

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        self.count += 1
        named = {"debug": False, "instrumentation_mode": "", **named}
        _, keys, _, backend, binder = kernel.device_caches[0]
        bound, specialization, options = binder(*args, **named)
        key = (kernel.__module__, kernel.__name__, compute_cache_key(keys, specialization, options))
        if key not in self.compiled:
            options, signature, constants, attributes = kernel._pack_args(
                backend, named, bound, specialization, options
            )
            self.compiled[key] = Compiled(kernel, signature, constants, attributes, options)

    @contextlib.contextmanager
    def new(self) -> Iterator[list[Compiled]]:
        """Yield a list that receives the kernels first compiled in the block."""
        before, found = len(self.compiled), list[Compiled]()
        yield found
        found += list(self.compiled.values())[before:]


def install() -> Launches:
    """Record launches from now on, and skip large computations and random draws."""
    load_kernels("triton")  # before the interpreter is enabled
    os.environ["TRITON_INTERPRET"] = "1"  # required by Triton on a CPU
    driver.set_active(_Driver())
    launches = Launches()
    JITFunction.run = lambda self, *args, **named: launches.run(self, *args, **named)
    F.linear = lambda x, weight, bias=None: x.new_zeros(*x.shape[:-1], len(weight))
    torch.bmm = lambda x, y: x.new_zeros(*x.shape[:2], y.shape[2])
    torch.empty = _blank
    torch.empty_like = lambda x, **_: torch.zeros_like(x)
    build.RandomWeights = Blank
    triton_integers.write_tiles = lambda matrix, number: None
    build.load_kernels = _steered
    return launches


def make(network: spec.NetworkSpec, config: EngineConfig, *, ready: bool = True) -> LoadedModel:
    """Build an engine of a network; `ready`: make the warm-up launches of a GPU engine."""
    model = build_random(network, config, stored=torch.bfloat16, stored_bytes=1, seed=0)
    if ready:
        precompile(model.loop, model.network, model.settings.max_model_len)
        runner = model.loop.runner
        assert runner
        batch = runner.batch
        graphs = Graphs(batch.step, batch.rows, lambda: batch.rows)
        with torch.inference_mode():
            for size, key in itertools.product(graphs.sizes, runner.graph_keys()):
                graphs.warm(batch.rows, key, size)
        batch.rows.clear()
    return model


def serve(model: LoadedModel, prompts: Sequence[int], params: Sequence[SamplingParams]) -> None:
    """Run requests to their ends: each prompt alone, then every kind of request together, staggered."""
    core, numbers = model.core, itertools.count(1)
    for length in prompts:
        _submit(core, next(numbers), length, params[0])
        core.run_until_idle()
    for param in params:
        _submit(core, next(numbers), 40, param)
        for _ in range(3):
            core.step()
    core.run_until_idle()


def _submit(core: EngineCore, number: int, length: int, params: SamplingParams) -> None:
    def emit(said: Delta | Exception) -> None:
        if isinstance(said, Exception):
            raise said

    core.add_request(core.new_request([number] * length, params, seed=number, emit=emit, stop_ids={}))


_empty = torch.empty


def _blank(*size: Any, **named: Any) -> Tensor:
    """Return zeros; large ones come fresh from the system, and take no memory until written."""
    made = _empty(*size, **named)
    return made.zero_() if made.device.type == "cpu" and made.nbytes < LARGE else made


class Blank:
    """Weights that are never written, and so take no memory."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        norm_offset: float,
        quantize: WeightFormat | None,
    ) -> None:
        self.dtype, self.device, self.quantize = dtype, device, quantize

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        return (
            self.quantize.empty(shape, self.dtype, self.device) if self.quantize else self.take(name, shape)
        )

    def output(self, name: str, weight_ND: Tensor) -> Matrix:
        form = self.quantize and self.quantize.output
        return form.empty(weight_ND.shape, self.dtype, self.device) if form else weight_ND

    def has(self, name: str) -> bool:
        return True

    def within(self, prefix: str) -> Weights:
        return Scoped(self, prefix)

    def finish(self) -> None: ...


def _alike(noted: Any, computed: Any) -> Any:
    """Cast the computed results to the recorded kernel's dtypes, as the CPU's are sometimes wider."""
    if isinstance(computed, Tensor):
        return computed.to(noted.dtype)
    return computed and tuple(map(_alike, noted, computed))


def _steered(name: str) -> Kernels:
    """Also compute operations that steer the host, with the CPU's kernels."""
    kernels, cpu = load_kernels(name), load_kernels("cpu")

    def both(field: str) -> Callable[..., Any]:
        noted, computed = getattr(kernels, field), getattr(cpu, field)

        def run(*args: Any, **named: Any) -> Any:
            return _alike(noted(*args, **named), computed(*args, **named))

        return run

    return replaced(kernels, **{own: both(own) for own in OPERATIONS if own in STEERING})
