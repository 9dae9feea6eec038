"""Launch each Triton kernel while its predecessor runs (programmatic dependent launch, Hopper and later).

A step is about a thousand short kernels in a row. Without overlap each one launches only after the previous
kernel's last program has ended and its writes have been flushed.
"""

import functools
from collections.abc import Callable
from typing import Any

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime.jit import JITFunction

HOPPER = 90


@functools.cache
def supports_overlap() -> bool:
    """Return whether the GPU can launch a kernel before the previous one has ended."""
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= HOPPER)


class OverlappingKernel(JITFunction[Any]):  # type: ignore[misc]
    """A kernel that may start before the previous one has ended: it must call `overlap` first."""

    def run(self, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if supports_overlap():
            named = {"launch_pdl": True, **named}
        return super().run(*args, grid=grid, warmup=warmup, **named)


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a kernel, as `triton.jit` does; its first statement must be `overlap()`."""
    if function is None:
        return functools.partial(kernel, **options)
    if triton.knobs.runtime.interpret:
        return triton.jit(function, **options)
    return OverlappingKernel(function, **options)


@triton.jit
def overlap() -> None:
    """Allow the next kernel to launch, then wait until the previous kernel's writes are visible."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()
