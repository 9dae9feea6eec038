"""Elementwise gates, for use inside the convolution kernels."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + e^x) to full precision, even if 1 + e^x rounds e^x away."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    tiny = u == 1.0
    return tl.where(x > 20.0, x, tl.where(tiny, e, tl.log(u) * (e / tl.where(tiny, 1.0, u - 1.0))))


@triton.jit
def step_size(dt, bias, low, high, LIMITED: tl.constexpr):
    """Return Mamba-2's step sizes; the sum and the step are rounded to the dtype of dt, then widened."""
    kind: tl.constexpr = dt.dtype
    total = (dt.to(tl.float32) + bias.to(kind).to(tl.float32)).to(kind)
    step = softplus(total.to(tl.float32)).to(kind).to(tl.float32)
    if LIMITED:
        step = tl.minimum(tl.maximum(step, low), high).to(kind).to(tl.float32)
    return step
