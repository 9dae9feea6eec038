"""RMS normalisation in few calls for a token, and with few intermediates for a prompt."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 1 << 15
"""Entries up to which the number of calls costs more than their passes over memory."""
PIECE = 1 << 18
"""Entries that a gated norm works on at a time, so that its many intermediates stay in the cache."""


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide the last dimension of x [..., D] by its root mean square, multiply by the weight, round last."""
    wide_D, size = _wide(x_D), x_D.shape[-1]
    if x_D.numel() == size and x_D.is_cpu:
        # The length of a single vector as a number on the host saves a third of the time.
        length = torch.linalg.vector_norm(wide_D).item()
        y_D = (wide_D * weight_D).mul_((length * length / size + eps) ** -0.5)
    elif x_D.numel() <= SMALL:
        y_D = torch.rms_norm(wide_D, (size,), weight_D.to(wide_D.dtype), eps)
    else:
        length_1 = torch.linalg.vector_norm(wide_D, dim=-1, keepdim=True)
        y_D = (wide_D * length_1.square_().div_(size).add_(eps).rsqrt_()).mul_(weight_D)
    return y_D.to(x_D.dtype)


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
    normalise = _norm_of_gated if gate_first else _gated_norm
    weight_RD = weight_D.view(-1, group_size)
    if x_TD.numel() <= PIECE:
        return normalise(x_TD, gate_TD, weight_RD, eps)
    out_TD = torch.empty_like(gate_TD, memory_format=torch.contiguous_format)
    for piece in _pieces(x_TD):
        out_TD[piece] = normalise(x_TD[piece], gate_TD[piece], weight_RD, eps)
    return out_TD


def _norm_of_gated(x_TD: Tensor, gate_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    wide_TD = F.silu(_wide(gate_TD)) * x_TD
    return _runs(wide_TD, weight_RD, eps, gate_TD.dtype).to(gate_TD.dtype)


def _gated_norm(x_TD: Tensor, gate_TD: Tensor, weight_RD: Tensor, eps: float) -> Tensor:
    y_TD = _runs(_wide(x_TD), weight_RD, eps, gate_TD.dtype)
    return F.silu(_wide(gate_TD)).mul_(y_TD).to(gate_TD.dtype)


def _runs(x_TD: Tensor, weight_RD: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    size = weight_RD.shape[-1]
    run_TRD = torch.rms_norm(x_TD.reshape(len(x_TD), -1, size), (size,), None, eps)
    return (run_TRD.to(dtype) * weight_RD).flatten(-2)


def _pieces(x_TD: Tensor) -> Iterator[slice]:
    tokens, width = x_TD.shape
    length = max(1, PIECE // width)
    return (slice(start, start + length) for start in range(0, tokens, length))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
