"""Which CPU kernels run here: the C kernels' compilation target and torch's CPU features."""

import ctypes
import functools
import os
from dataclasses import dataclass

import torch

from specdec.kernels.native.compiled import loaded
from specdec.kernels.native.targets import CompileTarget, unused

LIBRARY = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's variable that limits its instruction set."""


@dataclass(frozen=True, slots=True)
class InstructionSets:
    """Instruction sets that the C kernels multiply with."""

    target: CompileTarget
    """Compilation target."""
    vectors: str
    pairs: bool
    """True if bfloat16 pairs are multiplied in hardware. Otherwise float32 gives the same bits, except for
    numbers below 2^-126, which the hardware treats as 0."""
    integers: str
    """Name of the integer product's instruction set."""
    tiles: bool
    """True if matrix units multiply bfloat16; their order of sums differs."""


@functools.cache
def c_kernels() -> InstructionSets | None:
    """Return the C kernels' instruction sets, or None without C kernels."""
    found = loaded()
    if found is None:
        return None
    library = found.library
    library.vectors.restype = library.integers.restype = ctypes.c_char_p
    return InstructionSets(
        target=found.target,
        vectors=library.vectors().decode(),
        pairs=bool(library.multiplies_pairs()),
        integers=library.integers().decode(),
        tiles=bool(library.multiplies_tiles()),
    )


def describe() -> str:
    """Describe the CPU kernels that run here."""
    found = c_kernels()
    in_c = "no C kernels"
    if found:
        units = " and matrix" if found.tiles else ""
        bfloat16 = f"with bfloat16{units} units" if found.pairs else "without bfloat16 units"
        left = f", {', '.join(unused(found.target))} unused" if unused(found.target) else ""
        in_c = (
            f"C kernels for {found.target.name}: {found.vectors} {bfloat16}, "
            f"integer products by {found.integers}{left}"
        )
    library = "with" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "without"
    limit = os.environ.get(LIBRARY)
    limited = f" up to {limit}" if limit else ""
    return f"{in_c}; torch for {torch.backends.cpu.get_cpu_capability()}, oneDNN{limited} {library} bfloat16"


def describe_kernels(name: str) -> str:
    """Return an engine's kernels by name, with the CPU target for `native`."""
    return f"{name}: {describe()}" if name == "native" else name
