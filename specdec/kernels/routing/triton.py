"""Routing in Triton: each program chooses one token's experts, all distinct.

Ties go to the lower index. NaN ranks below every number, so even a token with NaN logits gets valid expert
ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import kernel, overlap


def route_softmax(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    assert logits_TE.stride(1) == 1
    tokens, experts = logits_TE.shape
    index_TA = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weight_TA = torch.empty(tokens, top_k, dtype=logits_TE.dtype, device=logits_TE.device)
    _softmax[(tokens,)](
        logits_TE, logits_TE.stride(0), index_TA, weight_TA, RENORMALISE=renormalise, **_sizes(experts, top_k)
    )
    return index_TA, weight_TA


def route_sigmoid(
    logits_TE: Tensor,
    bias_E: Tensor,
    top_k: int,
    *,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    assert logits_TE.stride(1) == 1
    tokens, experts = logits_TE.shape
    index_TA = torch.empty(tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weight_TA = torch.empty(tokens, top_k, dtype=logits_TE.dtype, device=logits_TE.device)
    _sigmoid[(tokens,)](
        logits_TE,
        logits_TE.stride(0),
        bias_E,
        index_TA,
        weight_TA,
        scale,
        eps,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        RENORMALISE=renormalise,
        BLOCK_G=triton.next_power_of_2(groups),
        **_sizes(experts, top_k),
    )
    return index_TA, weight_TA


def _sizes(experts: int, top_k: int) -> dict[str, int]:
    block = triton.next_power_of_2(experts)
    return {"E": experts, "TOP_K": top_k, "BLOCK": block, "BLOCK_A": triton.next_power_of_2(top_k)} | {
        "num_warps": 1 if block <= 512 else 2  # a single warp needs no synchronisation between choices
    }


@triton.jit
def _choose(key_E, weigh_E, TOP_K: tl.constexpr, BLOCK_A: tl.constexpr):
    """Choose the largest keys, ties to the lower index; keys of −inf are never chosen."""
    at_E, at_A = tl.arange(0, key_E.shape[0]), tl.arange(0, BLOCK_A)
    index_A = tl.zeros((BLOCK_A,), tl.int32)
    for choice in range(TOP_K):
        best = tl.argmax(key_E, 0, tie_break_left=True)
        index_A = tl.where(at_A == choice, best, index_A)
        key_E = tl.where(at_E == best, float("-inf"), key_E)
    return index_A, tl.where(at_A < TOP_K, tl.gather(weigh_E, index_A, 0), 0.0)


@triton.jit
def _finite(value_E):
    """Replace NaN and −inf by a value below all other numbers but above the −inf of excluded experts."""
    return tl.where(value_E > -3.0e38, value_E, -3.0e38)


@triton.jit
def _rounded(value, kind: tl.constexpr):
    return value.to(kind).to(tl.float32)


@kernel
def _softmax(
    logits, by_token, index, weight, RENORMALISE: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at_E, at_A = tl.arange(0, BLOCK), tl.arange(0, BLOCK_A)
    logit_E = tl.load(logits + token * by_token + at_E, mask=at_E < E, other=float("-inf")).to(tl.float32)
    share_E = tl.exp(logit_E - tl.max(logit_E, 0))
    share_E = share_E / tl.sum(share_E, 0)
    key_E = tl.where(at_E < E, _finite(logit_E), float("-inf"))
    index_A, weight_A = _choose(key_E, share_E, TOP_K, BLOCK_A)
    if RENORMALISE:
        weight_A = weight_A / tl.sum(weight_A, 0)
    tl.store(index + token * TOP_K + at_A, index_A.to(tl.int64), mask=at_A < TOP_K)
    tl.store(weight + token * TOP_K + at_A, weight_A.to(weight.dtype.element_ty), mask=at_A < TOP_K)


@kernel
def _sigmoid(
    logits, by_token, bias, index, weight, factor, eps,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_G: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    overlap()
    token = tl.program_id(0).to(tl.int64)
    at_E, at_A = tl.arange(0, BLOCK), tl.arange(0, BLOCK_A)
    logit_E = tl.load(logits + token * by_token + at_E, mask=at_E < E, other=0.0).to(tl.float32)
    score_E = _rounded(1.0 / (1.0 + tl.exp(-logit_E)), logits.dtype.element_ty)
    key_E = _finite(score_E + tl.load(bias + at_E, mask=at_E < E, other=0.0).to(tl.float32))
    key_E = tl.where(at_E < E, key_E, float("-inf"))
    if TOP_GROUPS < GROUPS:
        at_G = tl.arange(0, BLOCK_G)
        group_E = at_E // (E // GROUPS)
        best_G = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        for group in range(GROUPS):
            inner_E = tl.where(group_E == group, key_E, float("-inf"))
            first = tl.argmax(inner_E, 0, tie_break_left=True)
            second = tl.max(tl.where(at_E == first, float("-inf"), inner_E), 0)
            best_G = tl.where(at_G == group, _finite(tl.max(inner_E, 0) + second), best_G)
        allowed_E = at_E < 0
        for _choice in range(TOP_GROUPS):
            group = tl.argmax(best_G, 0, tie_break_left=True)
            allowed_E = allowed_E | (group_E == group)
            best_G = tl.where(at_G == group, float("-inf"), best_G)
        key_E = tl.where(allowed_E & (at_E < E), key_E, float("-inf"))
    index_A, weight_A = _choose(key_E, score_E, TOP_K, BLOCK_A)
    if RENORMALISE:
        kind: tl.constexpr = logits.dtype.element_ty
        total = _rounded(_rounded(tl.sum(weight_A, 0), kind) + eps, kind)
        weight_A = _rounded(weight_A / total, kind)
    tl.store(index + token * TOP_K + at_A, index_A.to(tl.int64), mask=at_A < TOP_K)
    scaled_A = (weight_A * factor).to(weight.dtype.element_ty)
    tl.store(weight + token * TOP_K + at_A, scaled_A, mask=at_A < TOP_K)
