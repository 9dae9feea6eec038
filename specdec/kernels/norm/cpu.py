"""RMS normalisation: few calls for a token, few intermediates for a prompt."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 1 << 15
"""Entries up to which call overhead exceeds the cost of memory passes."""
PIECE = 1 << 18
"""Entries per step of a gated norm, so that its intermediates stay in the cache."""


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    size = x_D.shape[-1]
    if x_D.dtype == weight_D.dtype and x_D.itemsize < 4:
        narrow_D: Tensor = torch.rms_norm(x_D, (size,), None, eps)
        return narrow_D.mul_(weight_D)
    float_D = _wide(x_D)
    if x_D.numel() == size and x_D.is_cpu:
        # For a single vector, computing the norm on the host saves a third of the time.
        length = torch.linalg.vector_norm(float_D).item()
        y_D = (float_D / math.sqrt(length * length / size + eps)).mul_(weight_D)
    elif x_D.numel() <= SMALL:
        y_D = torch.rms_norm(float_D, (size,), weight_D.to(float_D.dtype), eps)
    else:
        length_1 = torch.linalg.vector_norm(float_D, dim=-1, keepdim=True)
        y_D = (float_D * length_1.square_().div_(size).add_(eps).rsqrt_()).mul_(weight_D)
    return y_D.to(x_D.dtype)


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
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
    assert not (sigmoid and gate_first), "a sigmoid gates last"
    if weight_D is None:
        return F.silu(_wide(gate_TD)).mul_(x_TD).to(gate_TD.dtype)
    normalise = _sigmoid_norm if sigmoid else _norm_of_gated if gate_first else _gated_norm
    weight_RD = weight_D.view(-1, group_size)
    if x_TD.numel() <= PIECE:
        return normalise(x_TD, gate_TD, weight_RD, eps)
    out_TD = torch.empty_like(gate_TD, memory_format=torch.contiguous_format)
    for piece in _pieces(x_TD):
        out_TD[piece] = normalise(x_TD[piece], gate_TD[piece], weight_RD, eps)
    return out_TD


def _norm_of_gated(x_TD: Tensor, gate_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    run_TRD = _runs(F.silu(_wide(gate_TD)).mul_(x_TD), weight_RD, eps)
    return run_TRD.mul_(weight_RD).flatten(-2).to(gate_TD.dtype)


def _gated_norm(x_TD: Tensor, gate_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    x_TD = x_TD.to(gate_TD.dtype) if weight_RD.dtype == gate_TD.dtype else _wide(x_TD)
    run_TRD = _runs(x_TD, weight_RD, eps)
    return F.silu(_wide(gate_TD)).mul_(run_TRD.mul_(weight_RD).flatten(-2)).to(gate_TD.dtype)


def _sigmoid_norm(x_TD: Tensor, gate_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    run_TRD = _runs(_wide(x_TD.to(gate_TD.dtype)), weight_RD, eps)
    return torch.sigmoid(_wide(gate_TD)).mul_(run_TRD.mul_(weight_RD).flatten(-2)).to(gate_TD.dtype)


def _runs(x_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    """Normalise each run; torch computes in float32 and rounds to x's dtype."""
    size = weight_RD.shape[-1]
    return torch.rms_norm(x_TD.reshape(len(x_TD), -1, size), (size,), None, eps)


def _pieces(x_TD: Tensor) -> Iterator[slice]:
    tokens, width = x_TD.shape
    length = max(1, PIECE // width)
    return (slice(start, start + length) for start in range(0, tokens, length))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
