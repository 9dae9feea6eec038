"""What a recurrence is fed, entry by entry."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.gates import cpu
from specdec.kernels.variants import Variant

BLOCK = 128


def mamba_step(dt_TH: Tensor, dt_bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """Return Mamba-2's step size: softplus(dt + bias) within its limits.

    The sum and the step are rounded to the model's dtype before the step is widened.
    """
    if dt_TH.dtype == torch.float64:
        return cpu.mamba_step(dt_TH, dt_bias_H, limit)
    tokens, heads = dt_TH.shape
    assert dt_TH.stride(1) == 1
    out_TH = torch.empty(tokens, heads, dtype=torch.float32, device=dt_TH.device)
    _mamba_step[(tokens, triton.cdiv(heads, BLOCK))](
        *(dt_TH, dt_TH.stride(0), dt_bias_H, out_TH, heads, *limit),
        LIMITED=limit[0] > 0 or limit[1] != math.inf,
        BLOCK=BLOCK,
        num_warps=1,
    )
    return out_TH


@triton.jit
def softplus(x):
    """Return log(1 + e^x), to the last digits also where 1 + e^x has lost those of e^x."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    lost = u == 1.0
    return tl.where(x > 20.0, x, tl.where(lost, e, tl.log(u) * (e / tl.where(lost, 1.0, u - 1.0))))


@triton.jit
def _mamba_step(dt, by_token, bias, out, heads, low, high, LIMITED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = dt.dtype.element_ty
    own = tl.load(dt + token * by_token + h, mask=h < heads, other=0.0).to(tl.float32)
    own += tl.load(bias + h, mask=h < heads, other=0.0).to(kind).to(tl.float32)
    step = softplus(own.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    if LIMITED:
        step = tl.minimum(tl.maximum(step, low), high).to(kind).to(tl.float32)
    tl.store(out + token * heads + h, step, mask=h < heads)


_TYPES = {"dt": "*bf16", "by_token": "i64", "bias": "*fp32", "out": "*fp32", "heads": "i32"}

VARIANTS = [
    Variant(
        _mamba_step, {**_TYPES, "low": "fp32", "high": "fp32"}, {"LIMITED": limited, "BLOCK": BLOCK}, warps=1
    )
    for limited in (True, False)
]
