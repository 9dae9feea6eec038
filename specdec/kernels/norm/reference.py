"""RMS normalisation as the models' formulas say."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide the last dimension of x [..., D] by its root mean square, multiply by the weight, round last."""
    return (_normalise(_wide(x_D), eps) * weight_D).to(x_D.dtype)


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add y to the residual stream x, in place, and return what the next layer reads of it."""
    if y_TD is not None:
        x_TD += y_TD
    return rms_norm(x_TD, weight_D, eps)


def gated_norm(
    x_TD: Tensor, gate_TD: Tensor, weight_D: Tensor, eps: float, group_size: int, *, gate_first: bool
) -> Tensor:
    """Normalise runs of `group_size` entries and gate them with silu, in the gate's dtype.

    Mamba-2 gates first, the gated delta net last. What is normalised is rounded to the gate's dtype before it
    meets the weight, as in training. A weight of `group_size` entries serves every run.
    """
    dtype, gate_TD = gate_TD.dtype, F.silu(_wide(gate_TD))
    x_TD = _wide(x_TD)
    if gate_first:
        x_TD = x_TD * gate_TD
    run_TRD = _normalise(x_TD.reshape(len(x_TD), -1, group_size), eps).to(dtype)
    y_TD = (run_TRD * weight_D.view(-1, group_size)).flatten(-2)
    return (y_TD if gate_first else y_TD * gate_TD).to(dtype)


def _normalise(x_D: Tensor, eps: float) -> Tensor:
    return x_D / torch.sqrt(x_D.square().mean(-1, keepdim=True) + eps)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
