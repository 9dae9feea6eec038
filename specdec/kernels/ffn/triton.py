"""The feed-forward activations: each entry is read once and written once."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(gate_up_TI: Tensor, limit: float = math.inf) -> Tensor:
    """Return silu(gate) · up for rows [gate | up], the first at most the limit and the second within it.

    The silu is rounded to their dtype before the product.
    """
    return _activate(gate_up_TI, gate_up_TI.shape[1] // 2, gated=True, limit=limit)


def relu2(x_TI: Tensor) -> Tensor:
    """Return the square of what is positive."""
    return _activate(x_TI, x_TI.shape[1], gated=False)


def add_gated(y_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> Tensor:
    """Return y + x · sigmoid(gate), rounded after each of the three."""
    tokens, width = y_TD.shape
    assert y_TD.is_contiguous() and x_TD.is_contiguous()
    out_TD = torch.empty_like(y_TD)
    _add_gated[(tokens, triton.cdiv(width, BLOCK))](
        *(y_TD, x_TD, gate_T1, gate_T1.stride(0), out_TD), WIDTH=width, BLOCK=BLOCK
    )
    return out_TD


def _activate(x_TI: Tensor, width: int, *, gated: bool, limit: float = math.inf) -> Tensor:
    assert x_TI.stride(1) == 1
    out_TI = torch.empty(len(x_TI), width, dtype=x_TI.dtype, device=x_TI.device)
    _activation[(len(x_TI), triton.cdiv(width, BLOCK))](
        *(x_TI, out_TI, x_TI.stride(0)),
        WIDTH=width,
        GATED=gated,
        LIMIT=limit if limit < math.inf else None,
        BLOCK=BLOCK,
    )
    return out_TI


@triton.jit
def weigh(silu, up, LIMIT: tl.constexpr):
    """Return silu · up, the first at most the limit and the second within it; NaN stays."""
    if LIMIT is not None:
        silu = tl.where(silu > LIMIT, LIMIT, silu)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return silu * up


@triton.jit
def _activation(
    x, out, x_by_token, WIDTH: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    kind = out.dtype.element_ty
    value = tl.load(x + token * x_by_token + at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + token * x_by_token + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
        value = (value / (1.0 + tl.exp(-value))).to(kind).to(tl.float32)
        value = weigh(value, up, LIMIT)
    else:
        # A comparison the other way around would turn what is no number into a zero.
        value = tl.where(value < 0, 0.0, value * value)
    tl.store(out + token * WIDTH + at, value.to(kind), mask=mask)


@triton.jit
def _add_gated(y, x, gate, gate_by_token, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    kind = out.dtype.element_ty
    share = tl.load(gate + token * gate_by_token).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-share))).to(kind).to(tl.float32)
    value = tl.load(x + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32) * share
    total = tl.load(y + token * WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    total += value.to(kind).to(tl.float32)
    tl.store(out + token * WIDTH + at, total.to(kind), mask=mask)
