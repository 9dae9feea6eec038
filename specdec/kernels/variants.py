"""A Triton kernel with the types and constants that a GPU would be given it with, to compile it anywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of a kernel. `types` names each tensor's entries or a number's type, in Triton's words.

    Each file of Triton kernels lists under `VARIANTS` what it launches for the shapes of real models.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2

    def __str__(self) -> str:
        """Name the kernel and what it is compiled for."""
        shown = " ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__} {shown} warps={self.warps}"
