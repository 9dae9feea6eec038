"""Mixtures of experts that are chosen, and multiplied by whole numbers, alike in every window.

Other weights are multiplied as in moe/cpu.py.
"""

from functools import partial

import torch
from torch import Tensor

from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix
from specdec.kernels.moe import cpu
from specdec.kernels.native.linear import WholePanels, lay_whole, linear
from specdec.kernels.native.pointwise import sigmoid

Packed = Tensor | tuple[WholePanels, ...]


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts by their biased scores; see moe/cpu.py."""
    score_TE = sigmoid(logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float())
    return cpu.choose_experts(
        *(score_TE, bias_E, top_k), groups=groups, top_groups=top_groups, renormalise=renormalise, scale=scale
    )


def pack_experts(weight_END: Matrix) -> Packed:
    """Lay each expert's weight of whole numbers out in panels."""
    if not isinstance(weight_END, Integers):
        return cpu.pack_experts(weight_END)
    return tuple(lay_whole(weight_END.expert(expert)) for expert in range(weight_END.shape[0]))


def experts(
    x_TD: Tensor, up_EID: Packed, down_EDI: Packed, index_TA: Tensor, weight_TA: Tensor, *, gated: bool
) -> Tensor:
    """Add up what each token's experts answer, times their weights."""
    up, down = _multiplier(up_EID), _multiplier(down_EDI)
    return cpu.mix(x_TD, up, down, index_TA, weight_TA, gated=gated)


def _multiplier(packed: Packed) -> cpu.Multiply:
    if isinstance(packed, Tensor):
        return partial(cpu.multiply, packed)
    return lambda expert, x_PD: linear(x_PD, packed[expert])
