"""Check tensor strides before a kernel reads by address: wrong strides would give wrong numbers."""

import functools
from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor


class StrideError(ValueError):
    """A tensor's strides are not supported by the kernel."""


OptionalTensor = TypeVar("OptionalTensor", bound=Tensor | None)


def dense(x: OptionalTensor) -> OptionalTensor:
    """Return the tensor (or None) if it is contiguous, else raise."""
    if x is not None and not x.is_contiguous():
        raise _refuse(x.shape, x.stride(), x.ndim)
    return x


def outer_strides(x: Tensor, inner: int) -> tuple[int, ...]:
    """Return the strides of all but the last `inner` dimensions, which must be contiguous."""
    return _outer_strides(x.shape, x.stride(), inner)


def window_stride(window_SIC: Tensor) -> int:
    """Return the slot stride of a convolution's windows, which must be stored channel-major."""
    (slots, inputs, channels), (by_slot, by_input, by_channel) = window_SIC.shape, window_SIC.stride()
    return _outer_strides((slots, channels, inputs), (by_slot, by_channel, by_input), 2)[0]


@functools.lru_cache(1024)
def _outer_strides(shape: tuple[int, ...], strides: tuple[int, ...], inner: int) -> tuple[int, ...]:
    apart, outer = 1, len(shape) - inner
    for size, stride in reversed(list(zip(shape[outer:], strides[outer:], strict=True))):
        if size > 1 and stride != apart:
            raise _refuse(shape, strides, inner)
        apart *= size
    return strides[:outer]


def _refuse(shape: Sequence[int], strides: Sequence[int], inner: int) -> StrideError:
    return StrideError(
        f"a tensor of shape {tuple(shape)} has strides {tuple(strides)}, but the kernel reads its last "
        f"{inner} dimensions as dense: pass a view in which they are, or a contiguous copy"
    )
