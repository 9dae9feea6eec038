"""The feed-forward activations; each function of one tensor is rounded to its dtype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_TI: Tensor, limit: float = math.inf) -> Tensor:
    """Return silu(gate) · up for rows [gate | up]: silu at most `limit`, up within ±`limit`."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return F.silu(_wide(gate_TI)).to(gate_TI.dtype).clamp(max=limit) * up_TI.clamp(-limit, limit)


def geglu(gate_up_TI: Tensor) -> Tensor:
    """Return gelu(gate) · up for rows [gate | up], gelu(x) = x Φ(x)."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    wide_TI = _wide(gate_TI)
    cdf_TI: Tensor = torch.special.ndtr(wide_TI)
    return (wide_TI * cdf_TI).to(gate_TI.dtype) * up_TI


def relu2(x_TI: Tensor) -> Tensor:
    """Return the squared ReLU."""
    return _wide(x_TI).clamp(min=0).square().to(x_TI.dtype)


def add_gated(y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor:
    """Return y + x · sigmoid(gate), rounded after each of the three."""
    sigmoid_T1 = torch.sigmoid(_wide(gate_T1)).to(x_TD.dtype)
    return y_TD + x_TD * sigmoid_T1


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
