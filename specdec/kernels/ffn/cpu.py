"""The feed-forward activations in their input's dtype."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up_TI: Tensor, limit: float = math.inf) -> Tensor:
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    if limit == math.inf:
        return F.silu(gate_TI).mul_(up_TI)
    return F.silu(gate_TI).clamp_(max=limit).mul_(up_TI.clamp(-limit, limit))


def geglu(gate_up_TI: Tensor) -> Tensor:
    """Return gelu(gate) · up for rows [gate | up], with the exact (error function) gelu."""
    gate_TI, up_TI = gate_up_TI.chunk(2, dim=-1)
    return F.gelu(gate_TI).mul_(up_TI)


def relu2(x_TI: Tensor) -> Tensor:
    return torch.relu(x_TI).square_()


def add_gated(y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor:
    return y_TD + x_TD * torch.sigmoid(gate_T1)
