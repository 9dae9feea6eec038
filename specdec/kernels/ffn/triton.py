"""The feed-forward activations: each entry is read once and written once."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import kernel, overlap

BLOCK = 1024


def swiglu(gate_up_TI: Tensor, limit: float = math.inf) -> Tensor:
    """Round the silu to the input's dtype before the product."""
    return _activate(gate_up_TI, gate_up_TI.shape[1] // 2, "swiglu", limit)


def geglu(gate_up_TI: Tensor) -> Tensor:
    """Return gelu(gate) · up for rows [gate | up]; the gelu is rounded to the input's dtype first."""
    return _activate(gate_up_TI, gate_up_TI.shape[1] // 2, "geglu")


def relu2(x_TI: Tensor) -> Tensor:
    return _activate(x_TI, x_TI.shape[1], "relu2")


def add_gated(y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor:
    tokens, width = y_TD.shape
    assert y_TD.is_contiguous() and x_TD.is_contiguous()
    out_TD = torch.empty_like(y_TD)
    _add_gated[(tokens, triton.cdiv(width, BLOCK))](
        *(y_TD, x_TD, gate_T1, gate_T1.stride(0), out_TD), WIDTH=width, BLOCK=BLOCK
    )
    return out_TD


def _activate(x_TI: Tensor, width: int, kind: str, limit: float = math.inf) -> Tensor:
    assert x_TI.stride(1) == 1
    out_TI = torch.empty(len(x_TI), width, dtype=x_TI.dtype, device=x_TI.device)
    _activation[(len(x_TI), triton.cdiv(width, BLOCK))](
        *(x_TI, out_TI, x_TI.stride(0)),
        WIDTH=width,
        KIND=kind,
        LIMIT=limit if limit < math.inf else None,
        BLOCK=BLOCK,
    )
    return out_TI


@triton.jit
def apply_gate(silu, up, LIMIT: tl.constexpr):
    """Return silu · up: silu at most `LIMIT`, up within ±`LIMIT`; NaN propagates."""
    if LIMIT is not None:
        silu = tl.where(silu > LIMIT, LIMIT, silu)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return silu * up


@kernel
def _activation(
    x, out, x_by_token, WIDTH: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    dtype = out.dtype.element_ty
    value = tl.load(x + token * x_by_token + at, mask=mask, other=0.0).to(tl.float32)
    if KIND == "relu2":
        # NaN must propagate: `value > 0` would turn it into 0.
        value = tl.where(value < 0, 0.0, value * value)
    else:
        up = tl.load(x + token * x_by_token + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        if KIND == "swiglu":
            gate = value / (1.0 + tl.exp(-value))
        else:
            gate = value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        value = apply_gate(gate.to(dtype).to(tl.float32), up, LIMIT)
    tl.store(out + token * WIDTH + at, value.to(dtype), mask=mask)


@kernel
def _add_gated(y, x, gate, gate_by_token, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    kind = out.dtype.element_ty
    sigmoid = tl.load(gate + token * gate_by_token).to(tl.float32)
    sigmoid = (1.0 / (1.0 + tl.exp(-sigmoid))).to(kind).to(tl.float32)
    value = tl.load(x + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32) * sigmoid
    total = tl.load(y + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    total += value.to(kind).to(tl.float32)
    tl.store(out + token * WIDTH + at, total.to(kind), mask=mask)
