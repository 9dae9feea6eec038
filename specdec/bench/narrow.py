"""Weights of eight bits, where the kernels know them; engines without them are measured too."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from specdec.kernels.table import Kernels

MODULE = "specdec.kernels.linear.fp8"
ITEM = 1
"""Bytes of an entry; the scales, one to a block of 16,384, are not counted."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """Round a matrix, or one of each expert, to eight bits; and back to the dtype that it stands for."""

    quantise: Callable[[Tensor], Any]
    widen: Callable[[Any], Tensor]


def narrow() -> Narrow | None:
    """Return how weights are rounded, or None where there are none of eight bits."""
    if find_spec(MODULE) is None:
        return None
    module = import_module(MODULE)
    return Narrow(module.quantise, module.widen)


def pack_experts(kernels: Kernels, weight_END: Any) -> Any:
    """Lay experts out as the kernels want them, if they want them in a way of their own."""
    pack: Callable[[Any], Any] | None = getattr(kernels, "pack_experts", None)
    return weight_END if pack is None else pack(weight_END)
