"""Unpack the GGUF blocks of a whole tensor in C."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.kernels.native.call import function, pointer
from specdec.kernels.native.threads import with_helpers

PARTS = ("number", "scale", "offset", "wide")
"""int8 integers, and in float32 their scales, offsets and dequantised weights."""


def unpack(
    data_X: NDArray[Any],
    layout: Sequence[int],
    blocks: int,
    part: str,
    out_X: Tensor,
    book_CN: NDArray[np.int8] | None = None,
) -> None:
    """Unpack one part of `blocks` GGUF blocks into `out_X`.

    `layout` is the type's id, weights, bytes and groups per block, middle, and whether it has offsets.
    `book_CN` is the type's codebook, if it has one. The caller has checked the sizes against the type.
    """
    with with_helpers():
        outs = (pointer(out_X) if name == part else None for name in PARTS)
        codebook = None if book_CN is None else book_CN.ctypes.data
        function("unpack_blocks")(*layout, data_X.ctypes.data, blocks, *outs, codebook)
