"""How Python reaches the C forms: which tensors they serve, and how arguments are handed over."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.native.library import MOST, library

TOKENS = 32
"""The widest step that is served: beyond it arithmetic outweighs calls, and threads help."""
assert TOKENS <= MOST

SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Pointer, Count, Real, Flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

ARGUMENTS = {
    "linear": "p nnn pp p n",
    "gumbel": "pp nn p",
    "top": "p nnn pp",
    "rms_norm": "p nnn nn p i f p",
    "add_rms_norm": "pp nn p i f p",
    "gated_norm": "pp nnn n p n f i p",
    "swiglu": "p nn n p",
    "rotate": "p nnnn nn pp p",
    "causal_conv": "p nnn n n pp p n p p nn ppp n ppp p p p",
    "path_conv": "nnn nn pp p n p p nn ppp n p p",
    "append": "pp nnn nn p nn n p n p",
    "recur": "ppppp p nnnnnn p n p p p ppp n ppp p",
    "delta_net": "p nn nnnn n ppp p n p p nn ppp n ppp p p p p n p p p f p",
    "self_attention": "p nnnnn i pp i f pp n p nn n p n p p f pp p",
}
ANSWERS = ("top",)
KINDS = {"p": Pointer, "n": Count, "f": Real, "i": Flag}


class Records(ctypes.Structure):
    """Mirror `records` of narrow.c."""

    _fields_ = [
        *((name, Pointer) for name in ("update", "decay")),
        *((name, Count) for name in ("update_slab", "update_place", "decay_slab", "decay_place")),
    ]


@functools.cache
def function(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    loaded = library()
    assert loaded is not None
    found = getattr(loaded, f"{name}_{SUFFIX[dtype]}" if dtype else name)
    found.argtypes = [KINDS[letter] for letter in ARGUMENTS[name].replace(" ", "")]
    found.restype = Flag if name in ANSWERS else None
    called: Callable[..., Any] = found
    return called


def serves(x_T: Tensor) -> bool:
    """Tell whether a packed tensor is narrow, on a CPU, of a type that the C forms know."""
    return x_T.shape[0] <= TOKENS and x_T.is_cpu and x_T.dtype in SUFFIX


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def path_width(group: Group) -> int:
    """Return how long a pending path can be."""
    return 0 if group.path is None else group.path.slab_BN.shape[1]


def ids(group: Group) -> tuple[int | None, ...]:
    """Say where the pending path's ids and lengths lie, how wide it is, and where records or states go."""
    path, leave = group.path or (None, None), (*(group.record or (None, None)), group.snapshot_BM)
    assert all(x is None or x.is_contiguous() for x in (*path, *leave))
    return *map(pointer, (*path, group.path_length_B)), path_width(group), *map(pointer, leave)


def records_of(memory: RecurrentMemory) -> Records:
    """Say where a layer's records lie."""
    parts = (memory.update_SRHW, memory.decay_SRH)
    strides = (stride for part in parts for stride in part.stride()[:2])
    return Records(*(part.data_ptr() for part in parts), *strides)
