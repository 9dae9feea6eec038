"""RMS normalisation, one program per run: each entry is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import kernel, overlap


def rms_norm(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    size = x_D.shape[-1]
    x_THD = x_D.view(-1, *x_D.shape[-2:]) if x_D.dim() > 2 else x_D.view(-1, 1, size)
    tokens, heads, _ = x_THD.shape
    out_D = torch.empty(x_D.shape, dtype=x_D.dtype, device=x_D.device)
    _rms_norm[(tokens * heads,)](
        x_THD,
        None,
        weight_D,
        out_D,
        *(heads, x_THD.stride(0), x_THD.stride(1), size, eps),
        OWN=weight_D.dtype == x_D.dtype and x_D.itemsize < 4,
        ADD=False,
        **_block(size),
    )
    return out_D


def add_rms_norm(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    tokens, size = x_TD.shape
    assert x_TD.is_contiguous() and (y_TD is None or y_TD.is_contiguous())
    out_TD = torch.empty_like(x_TD)
    _rms_norm[(tokens,)](
        x_TD,
        y_TD,
        weight_D,
        out_TD,
        *(1, size, 0, size, eps),
        OWN=weight_D.dtype == x_TD.dtype and x_TD.itemsize < 4,
        ADD=y_TD is not None,
        **_block(size),
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
    tokens, width = x_TD.shape
    assert x_TD.stride(1) == gate_TD.stride(1) == 1
    out_TD = torch.empty(tokens, width, dtype=gate_TD.dtype, device=x_TD.device)
    runs = width // group_size
    _gated_norm[(tokens * runs,)](
        x_TD,
        gate_TD,
        weight_D,
        out_TD,
        *(runs, x_TD.stride(0), gate_TD.stride(0), group_size),
        *(1 if weight_D is None else len(weight_D) // group_size, eps),
        GATE_FIRST=gate_first,
        WIDE=weight_D is not None and weight_D.dtype != gate_TD.dtype,
        SIGMOID=sigmoid,
        **_block(group_size),
    )
    return out_TD


def _block(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


@kernel
def _rms_norm(
    x, y, weight, out, heads, by_token, by_head, size, eps,
    OWN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    run = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < size
    x += run // heads * by_token + run % heads * by_head + at
    value = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(y + run * size + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(x, value.to(x.dtype.element_ty), mask=mask)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value) / size + eps))
    if OWN:
        value = value.to(x.dtype.element_ty).to(tl.float32)
    value *= tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + run * size + at, value.to(out.dtype.element_ty), mask=mask)


@kernel
def _gated_norm(
    x, gate, weight, out, runs, x_by_token, gate_by_token, size, weights, eps,
    GATE_FIRST: tl.constexpr, WIDE: tl.constexpr, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    overlap()
    program = tl.program_id(0).to(tl.int64)
    token, run = program // runs, program % runs
    at = tl.arange(0, BLOCK)
    mask = at < size
    kind = out.dtype.element_ty
    value = tl.load(x + token * x_by_token + run * size + at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_by_token + run * size + at, mask=mask, other=0.0).to(tl.float32)
    factor = (1.0 if SIGMOID else z) / (1.0 + tl.exp(-z))
    if weight is None:
        value *= factor
    else:
        weigh = tl.load(weight + run % weights * size + at, mask=mask, other=0.0).to(tl.float32)
        if GATE_FIRST:
            value *= factor
        elif not WIDE:
            value = value.to(kind).to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value) / size + eps))
        if GATE_FIRST:
            value *= weigh
        elif WIDE or SIGMOID:
            value *= weigh * factor
        else:
            value = (value.to(kind).to(tl.float32) * weigh).to(kind).to(tl.float32) * factor
    tl.store(out + program * size + at, value.to(kind), mask=mask)
