"""Kernels of plain torch that multiply by integer weights as specified, with quantized activations."""

import math
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.ffn.cpu import relu2, swiglu
from specdec.kernels.linear import integers, reference
from specdec.kernels.linear.integers import Integers
from specdec.kernels.linear.matrix import Matrix, expert_of
from specdec.kernels.moe import cpu
from specdec.kernels.table import Kernels, load_kernels, replaced


def _multiply(x_TD: Tensor, matrix: Matrix) -> Tensor:
    if isinstance(matrix, Integers):
        return integers.multiply(x_TD, matrix).to(x_TD.dtype)
    return reference.linear(x_TD, reference.pack(matrix))


def linear(x_TD: Tensor, packed: reference.ReferencePackedLinear) -> Tensor:
    y_TN = torch.cat([_multiply(x_TD, part) for part in packed.parts], 1)
    return y_TN if packed.bias_N is None else y_TN + packed.bias_N


def experts(
    x_TD: Tensor,
    up_EID: Matrix,
    down_EDI: Matrix,
    index_TA: Tensor,
    weight_TA: Tensor,
    *,
    gated: bool,
    limit: float = math.inf,
) -> Tensor:
    up, down = (
        lambda expert, x_PD, all_=all_: _multiply(x_PD, expert_of(all_, expert))
        for all_ in (up_EID, down_EDI)
    )
    activate = partial(swiglu, limit=limit) if gated else relu2
    return cpu.mix(x_TD, up, activate, down, index_TA, weight_TA)


def keep(weight: Matrix) -> Matrix:
    return weight


def rounded_kernels() -> Kernels:
    return replaced(
        load_kernels("cpu"), pack=reference.pack, linear=linear, pack_experts=keep, experts=experts
    )
