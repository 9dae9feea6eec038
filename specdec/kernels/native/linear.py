"""y = x Wᵀ + b in C, in float32 and bfloat16.

What the product of a small matrix costs is mostly the call, and here that is short.
A row's result does not depend on the window it is read in, as it does in the library's kernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.linear import cpu
from specdec.kernels.linear.matrix import Matrix, widen
from specdec.kernels.native.call import function, pointer
from specdec.kernels.native.forms import Forms, forms
from specdec.kernels.native.signatures import SUFFIX

PANEL = 16
TILED_FROM = 1 << 22
"""Entries from which a processor with matrix units for bfloat16 is better served by oneDNN."""


class Panels(NamedTuple):
    weight: Tensor
    """[N / 16, K, 16], or in bfloat16 [N / 16, K / 2, 16, 2]; outputs filled up with zeros."""
    bias_N: Tensor | None
    outputs: int
    widens: bool
    """Whether rows are multiplied in float32 that come in bfloat16."""


def _serves(weight_ND: Tensor, found: Forms) -> bool:
    in_c = weight_ND.is_cpu and weight_ND.dtype in SUFFIX and weight_ND.shape[1] % 2 == 0
    tiled = weight_ND.dtype == torch.bfloat16 and weight_ND.numel() >= TILED_FROM and found.tiles
    return in_c and not tiled


def pack(weight: Matrix | list[Matrix], bias_N: Tensor | None = None) -> Panels | cpu.Packed:
    """Lay a weight out in panels, or as the CPU's other form where this one does not serve."""
    parts = weight if isinstance(weight, list) else [weight]
    weight_ND = widen(parts[0]) if len(parts) == 1 else torch.cat([widen(part) for part in parts])
    found = forms()
    if found is None or not _serves(weight_ND, found):
        return cpu.pack(weight_ND, bias_N)
    outputs, inputs = weight_ND.shape
    panels, together = -(-outputs // PANEL), 4 // weight_ND.itemsize
    filled = weight_ND.new_zeros(panels * PANEL, inputs)
    filled[:outputs] = weight_ND
    laid = filled.view(panels, PANEL, inputs // together, together).transpose(1, 2).contiguous()
    widens = weight_ND.dtype == torch.bfloat16 and not found.pairs
    return Panels(laid, bias_N, outputs, widens)


def linear(x_TD: Tensor, packed: Panels | cpu.Packed) -> Tensor:
    """Multiply in the weight's own dtype."""
    if not isinstance(packed, Panels):
        return cpu.linear(x_TD, packed)
    weight, bias_N, outputs, widens = packed
    assert x_TD.dtype == weight.dtype
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    tokens, inputs = x_TD.shape
    y_TN = x_TD.new_empty((tokens, outputs))
    wide_TD = torch.empty((tokens, inputs), dtype=torch.float32) if widens else None
    function("linear", weight.dtype)(
        *(x_TD.data_ptr(), tokens, x_TD.stride(0), inputs),
        *(weight.data_ptr(), pointer(bias_N), pointer(wide_TD), y_TN.data_ptr(), outputs),
    )
    return y_TN
