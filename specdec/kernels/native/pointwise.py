"""Norms, rotation and activations for narrow windows."""

import math

import torch
from torch import Tensor

from specdec.kernels.ffn import cpu as ffn
from specdec.kernels.native.call import function, pointer, serves, strided
from specdec.kernels.norm import cpu as norm
from specdec.kernels.rope import cpu as rope


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise [T, D] or [T, H, D]; tokens and heads may be strided."""
    if not serves(x_D) or x_D.stride(-1) != 1 or weight_D.dtype not in (torch.float32, x_D.dtype):
        return norm.rms_norm(x_D, weight_D, eps)
    out_D = torch.empty(x_D.shape, dtype=x_D.dtype)
    at, by_token, *by_head = strided(x_D, 1)
    function("rms_norm", x_D.dtype)(
        at,
        x_D.shape[0],
        x_D.shape[1] if by_head else 1,
        x_D.shape[-1],
        by_token,
        *(by_head or (0,)),
        pointer(weight_D),
        weight_D.dtype == x_D.dtype,
        eps,
        pointer(out_D),
    )
    return out_D


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Add and normalise contiguous rows in one call."""
    if y_TD is None:
        return rms_norm(x_TD, weight_D, eps)
    dense = x_TD.is_contiguous() and y_TD.is_contiguous() and y_TD.dtype == x_TD.dtype
    if not dense or not serves(x_TD) or weight_D.dtype not in (torch.float32, x_TD.dtype):
        return norm.add_rms_norm(x_TD, y_TD, weight_D, eps)
    out_TD = torch.empty_like(x_TD)
    function("add_rms_norm", x_TD.dtype)(
        pointer(x_TD),
        pointer(y_TD),
        *x_TD.shape,
        pointer(weight_D),
        weight_D.dtype == x_TD.dtype,
        eps,
        pointer(out_TD),
    )
    return out_TD


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
    """Normalise runs of a float32 tensor and gate them."""
    same_dtype = weight_D is None or weight_D.dtype == gate_TD.dtype
    if not serves(gate_TD) or gate_TD.stride(-1) != 1 or not same_dtype:
        return norm.gated_norm(
            x_TD, gate_TD, weight_D, eps, group_size, gate_first=gate_first, sigmoid=sigmoid
        )
    x_TD = x_TD.float().contiguous()
    out_TD, (gate_at, by_token) = torch.empty(gate_TD.shape, dtype=gate_TD.dtype), strided(gate_TD, 1)
    function("gated_norm", gate_TD.dtype)(
        pointer(x_TD),
        gate_at,
        x_TD.shape[0],
        gate_TD.shape[1] // group_size,
        group_size,
        by_token,
        pointer(weight_D),
        group_size if weight_D is not None and weight_D.numel() > group_size else 0,
        eps,
        2 if sigmoid else int(gate_first),
        pointer(out_TD),
    )
    return out_TD


def swiglu(gate_up_TI: Tensor, limit: float = math.inf) -> Tensor:
    if not _gates(gate_up_TI):
        return ffn.swiglu(gate_up_TI, limit)
    return _gate("swiglu", gate_up_TI, limit)


def geglu(gate_up_TI: Tensor) -> Tensor:
    """Return gelu(gate) · up for rows [gate | up], with the exact (error function) gelu."""
    return _gate("geglu", gate_up_TI) if _gates(gate_up_TI) else ffn.geglu(gate_up_TI)


def _gates(gate_up_TI: Tensor) -> bool:
    return serves(gate_up_TI) and gate_up_TI.stride(-1) == 1


def _gate(name: str, gate_up_TI: Tensor, *limit: float) -> Tensor:
    (tokens, double), (at, by_token) = gate_up_TI.shape, strided(gate_up_TI, 1)
    out_TI = torch.empty((tokens, double // 2), dtype=gate_up_TI.dtype)
    function(name, out_TI.dtype)(at, tokens, double // 2, by_token, *limit, pointer(out_TI))
    return out_TI


def relu2(x_TI: Tensor) -> Tensor:
    if not serves(x_TI) or not x_TI.is_contiguous():
        return ffn.relu2(x_TI)
    out_TI = torch.empty_like(x_TI)
    function("relu2", x_TI.dtype)(pointer(x_TI), x_TI.numel(), pointer(out_TI))
    return out_TI


def sigmoid(x_TN: Tensor) -> Tensor:
    """Return sigmoid(x), every entry computed identically; torch's vector and scalar paths differ."""
    if not serves(x_TN) or x_TN.stride(1) != 1:
        return torch.sigmoid(x_TN)
    out_TN, (at, by_token) = x_TN.new_empty(x_TN.shape), strided(x_TN, 1)
    function("sigmoid", x_TN.dtype)(at, *x_TN.shape, by_token, pointer(out_TN))
    return out_TN


def add_gated(y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor:
    """Return y + x · sigmoid(gate)."""
    return y_TD + x_TD * sigmoid(gate_T1)


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first 2R entries of each head."""
    if not serves(x_THD) or x_THD.stride(2) != 1:
        return rope.rotate(x_THD, cos_TR, sin_TR)
    out_THD, (at, *strides) = torch.empty(x_THD.shape, dtype=x_THD.dtype), strided(x_THD, 1)
    function("rotate", x_THD.dtype)(
        at, *x_THD.shape, cos_TR.shape[1], *strides, pointer(cos_TR), pointer(sin_TR), pointer(out_THD)
    )
    return out_THD
