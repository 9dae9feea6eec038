"""Pinned host memory of exactly the requested size."""

import weakref
from typing import Protocol, cast

import torch
from torch import Tensor

from specdec.errors import CapacityError


class Runtime(Protocol):
    """The used part of CUDA's runtime; each call returns 0 or an error code."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int: ...

    def cudaHostUnregister(self, pointer: int, /) -> int: ...


def pin(data: Tensor, owner: object, runtime: Runtime | None = None) -> None:
    """Pin a tensor's pages until its owner is collected.

    torch's own pinned memory is rounded to powers of two: 70 GiB would become 128.
    """
    if runtime is None:
        runtime = cast(Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    if error := int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)):
        raise CapacityError(
            f"memory_bytes: {data.nbytes:,} bytes of the host cannot be pinned (CUDA error {error}); give "
            "less, or raise the limit on locked memory (ulimit -l)",
            field="memory_bytes",
        )
    # The finalizer holds the tensor: memory freed while registered stays locked.
    weakref.finalize(owner, _unpin, runtime, data).atexit = False


def _unpin(runtime: Runtime, data: Tensor) -> None:
    """Unpin the pages once no copy is in flight, then release the tensor."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    runtime.cudaHostUnregister(data.data_ptr())


def sent(hidden_1D: Tensor | None, device: torch.device) -> Tensor | None:
    """Copy a hidden state, if any, to a tier's device, without waiting for the current step."""
    if hidden_1D is None or hidden_1D.device == device:
        return hidden_1D
    pinned = device.type == "cpu"
    copy_1D = torch.empty(hidden_1D.shape, dtype=hidden_1D.dtype, device=device, pin_memory=pinned)
    return copy_1D.copy_(hidden_1D, non_blocking=True)
