"""Mixtures of experts in C: a token's result does not depend on its window."""

import math
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.ffn.cpu import relu2
from specdec.kernels.linear import cpu as linear_cpu
from specdec.kernels.linear.matrix import Matrix, expert_of
from specdec.kernels.moe import cpu
from specdec.kernels.native.call import TOKENS
from specdec.kernels.native.linear import MixedFormatLinear, Panels, WholePanels, linear, pack
from specdec.kernels.native.pointwise import sigmoid, swiglu

Packed = tuple[Panels | WholePanels | MixedFormatLinear | linear_cpu.CpuPackedLinear, ...]
"""One packed weight per expert, as for any other product."""


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """Choose experts by their biased scores; see moe/cpu.py."""
    score_TE = sigmoid(logits_TE)
    return cpu.choose_experts(
        score_TE,
        bias_E,
        top_k,
        groups=groups,
        top_groups=top_groups,
        renormalise=renormalise,
        scale=scale,
        eps=eps,
    )


def pack_experts(weight_END: Matrix) -> Packed:
    """Pack the experts one by one, so that there is no second copy of them all."""
    return tuple(pack(expert_of(weight_END, expert)) for expert in range(weight_END.shape[0]))


def experts(
    x_TD: Tensor,
    up_EID: Packed,
    down_EDI: Packed,
    index_TA: Tensor,
    weight_TA: Tensor,
    *,
    gated: bool,
    limit: float = math.inf,
) -> Tensor:
    """Sum the outputs of each token's experts times their weights."""

    def up(expert: int, x_PD: Tensor) -> Tensor:
        return linear(x_PD, up_EID[expert])

    def down(expert: int, x_PI: Tensor) -> Tensor:
        return linear(x_PI, down_EDI[expert])

    activate = partial(_swiglu, limit=limit) if gated else relu2
    return cpu.mix(x_TD, up, activate, down, index_TA, weight_TA)


def _swiglu(gate_up_PI: Tensor, limit: float) -> Tensor:
    """Compute in C, in pieces, for any number of pairs, because torch rounds differently."""
    parts = [swiglu(part, limit) for part in torch.split(gate_up_PI, TOKENS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
