"""Memory of the host that a GPU copies by itself, in the size that was asked for."""

import weakref
from typing import Protocol, cast

import torch
from torch import Tensor

from specdec.errors import CapacityError


class Runtime(Protocol):
    """What is needed of CUDA's runtime; each call returns 0 or an error's number."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> int: ...

    def cudaHostUnregister(self, pointer: int, /) -> int: ...


def pin(data: Tensor, owner: object, runtime: Runtime | None = None) -> None:
    """Lock a tensor's pages until its owner goes.

    torch's own pinned memory comes in powers of two: of 70 GiB it would make 128.
    """
    if runtime is None:
        runtime = cast(Runtime, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    if error := int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)):
        raise CapacityError(
            f"memory_bytes: {data.nbytes:,} bytes of the host cannot be pinned (CUDA error {error}); give "
            "less, or raise the limit on locked memory (ulimit -l)",
            field="memory_bytes",
        )
    # The tensor is held until then: memory that is freed while it is registered stays locked.
    weakref.finalize(owner, _unpin, runtime, data).atexit = False


def _unpin(runtime: Runtime, data: Tensor) -> None:
    """Unlock the pages once no copy is under way; the tensor is let go behind that."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    runtime.cudaHostUnregister(data.data_ptr())


def sent(hidden_1D: Tensor | None, device: torch.device) -> Tensor | None:
    """Bring a hidden state, if there is one, to a tier, and wait for no step that is under way."""
    if hidden_1D is None or hidden_1D.device == device:
        return hidden_1D
    pinned = device.type == "cpu"
    own_1D = torch.empty(hidden_1D.shape, dtype=hidden_1D.dtype, device=device, pin_memory=pinned)
    return own_1D.copy_(hidden_1D, non_blocking=True)
