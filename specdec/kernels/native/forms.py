"""Which CPU kernels run here: what the C kernels were compiled for, and what torch may use."""

import ctypes
import functools
import os
from dataclasses import dataclass

import torch

from specdec.kernels.native.compiled import loaded
from specdec.kernels.native.targets import Target, unused

LIBRARY = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's own variable for what it may use of a processor."""


@dataclass(frozen=True, slots=True)
class Forms:
    """What the C kernels multiply with."""

    target: Target
    """What they were compiled for."""
    vectors: str
    pairs: bool
    """Whether units multiply pairs of bfloat16; without, they are multiplied in float32, to the same bits but
    for numbers below 2^-126, which the units take for 0."""
    integers: str
    """What integers are multiplied by."""
    tiles: bool
    """Whether matrix units multiply bfloat16; they sum in an order of their own."""


@functools.cache
def forms() -> Forms | None:
    """Ask the C kernels what they were compiled for; None where there are none."""
    found = loaded()
    if found is None:
        return None
    library = found.library
    library.vectors.restype = library.integers.restype = ctypes.c_char_p
    return Forms(
        target=found.target,
        vectors=library.vectors().decode(),
        pairs=bool(library.multiplies_pairs()),
        integers=library.integers().decode(),
        tiles=bool(library.multiplies_tiles()),
    )


def describe() -> str:
    """Describe the CPU kernels that run here."""
    found = forms()
    in_c = "no C kernels"
    if found:
        units = " and matrix" if found.tiles else ""
        bfloat16 = f"with bfloat16{units} units" if found.pairs else "without bfloat16 units"
        left = f", without use for {', '.join(unused(found.target))}" if unused(found.target) else ""
        in_c = (
            f"C kernels for {found.target.name}: {found.vectors} {bfloat16}, "
            f"integer products by {found.integers}{left}"
        )
    library = "with" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "without"
    limit = os.environ.get(LIBRARY)
    at_most = f" up to {limit}" if limit else ""
    return f"{in_c}; torch for {torch.backends.cpu.get_cpu_capability()}, oneDNN{at_most} {library} bfloat16"


def describe_kernels(name: str) -> str:
    """Name what an engine computes with; the C kernels are as good as what they were compiled for."""
    return f"{name}: {describe()}" if name == "native" else name
