"""RMS normalisation, as in the models' formulas."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide the last dimension of x [..., D] by its root mean square and multiply by the weight.

    A weight wider than x is multiplied before rounding; one in x's dtype is multiplied after it.
    """
    y_D = _normalise(_wide(x_D), eps)
    if weight_D.dtype == x_D.dtype:
        y_D = y_D.to(x_D.dtype)
    return (y_D * weight_D).to(x_D.dtype)


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add y to the residual stream x, in place, and return the sum normalised."""
    if y_TD is not None:
        x_TD += y_TD
    return rms_norm(x_TD, weight_D, eps)


def gated_norm(
    x_TD: Tensor,
    gate_TD: Tensor,
    weight_D: Tensor | None,
    eps: float,
    group_size: int,
    *,
    gate_first: bool,
    sigmoid: bool = False,
) -> Tensor:
    """Normalise runs of `group_size` entries and gate them with silu, in the gate's dtype.

    Mamba-2 gates first and rounds last, as its reference does in prefill. The gated delta net gates last and
    rounds x, the normalised and the weighted values to the gate's dtype, unless the weight is wider.
    `sigmoid` replaces silu, gates last and rounds only x and the result. A weight of `group_size` entries
    applies to every run; without a weight x is only gated.
    """
    dtype, silu_TD = gate_TD.dtype, F.silu(_wide(gate_TD))
    if weight_D is None:
        return (_wide(x_TD) * silu_TD).to(dtype)
    weight_RD = weight_D.view(-1, group_size)
    if sigmoid:
        x_TRD = _wide(x_TD.to(dtype)).reshape(len(x_TD), -1, group_size)
        y_TD = (_normalise(x_TRD, eps) * _wide(weight_RD)).flatten(-2)
        return (y_TD * torch.sigmoid(_wide(gate_TD))).to(dtype)
    if gate_first:
        x_TRD = (_wide(x_TD) * silu_TD).reshape(len(x_TD), -1, group_size)
        return (_normalise(x_TRD, eps) * weight_RD).flatten(-2).to(dtype)
    if weight_D.dtype != dtype:
        x_TRD = _wide(x_TD).reshape(len(x_TD), -1, group_size)
        return ((_normalise(x_TRD, eps) * weight_RD).flatten(-2) * silu_TD).to(dtype)
    x_TRD = _wide(x_TD.to(dtype)).reshape(len(x_TD), -1, group_size)
    y_TD = (_normalise(x_TRD, eps).to(dtype) * weight_RD).flatten(-2)
    return (y_TD * silu_TD).to(dtype)


def _normalise(x_D: Tensor, eps: float) -> Tensor:
    return x_D / torch.sqrt(x_D.square().mean(-1, keepdim=True) + eps)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
