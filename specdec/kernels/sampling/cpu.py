"""Sampling for many rows at once. What a row does not use leaves its numbers as they were, bit for bit."""

import torch
from torch import Tensor

from specdec.kernels.sampling.rules import Penalties, Rules

LARGEST = 1 - 2.0**-24
"""As in reference.py."""


def gumbel(seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor:
    """Return the noise [N, V] of every token at each row's position; reference.py has the formula."""
    mixed_N = _splitmix64(_splitmix64(seed_N + 1) ^ position_N)
    key_N1 = mixed_N.to(torch.int32)[:, None]
    tweak_N1 = (mixed_N >> 32).to(torch.int32)[:, None]
    token_V = torch.arange(vocab, dtype=torch.int32, device=seed_N.device) * _signed(0x9E3779B1)
    h_NV = token_V + key_N1
    h_NV ^= _shift(h_NV, 16)
    h_NV *= _signed(0x85EBCA6B)
    h_NV ^= _shift(h_NV, 13)
    h_NV += tweak_N1
    h_NV *= _signed(0xC2B2AE35)
    h_NV ^= _shift(h_NV, 16)
    h_NV *= _signed(0x27D4EB2F)
    h_NV ^= _shift(h_NV, 15)
    w_NV = h_NV.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST)
    return w_NV.neg_().log1p_().neg_().log_().neg_()


def process(logits_NV: Tensor, rules: Rules) -> Tensor:
    """Apply bias, penalties, temperature, min_p, top_k and top_p in this order; cut to minus infinity."""
    scores_NV = logits_NV.clone()
    if rules.bias is not None:
        scores_NV.index_put_((rules.bias.row_E, rules.bias.token_E), rules.bias.value_E, accumulate=True)
    if rules.penalties is not None:
        rows_R = rules.penalties.row_R
        scores_NV[rows_R] = _penalise(scores_NV[rows_R], rules.penalties)
    scores_NV /= torch.where(rules.temperature_N > 0, rules.temperature_N, 1)[:, None]
    if rules.min_p_N is not None:
        least_N1 = scores_NV.amax(-1, keepdim=True) + rules.min_p_N.log()[:, None]
        scores_NV.masked_fill_(scores_NV < least_N1, -torch.inf)
    if rules.top_k_N is not None or rules.top_p_N is not None:
        _cut_tail(scores_NV, rules)
    return scores_NV


def _penalise(scores_RV: Tensor, penalties: Penalties) -> Tensor:
    _, seen_RV, count_RV, repetition_R, presence_R, frequency_R = penalties
    factor_RV = torch.where(seen_RV, repetition_R[:, None], 1)
    scores_RV = torch.where(scores_RV > 0, scores_RV / factor_RV, scores_RV * factor_RV)
    return scores_RV - (frequency_R[:, None] * count_RV + presence_R[:, None] * (count_RV > 0))


def _cut_tail(scores_NV: Tensor, rules: Rules) -> None:
    """Keep the best k, and of those the best that together hold top_p; among equals the smaller id is better.

    Only rows that ask are sorted, so that a row's result does not depend on the others.
    """
    vocab, rows = scores_NV.shape[1], torch.arange(len(scores_NV), device=scores_NV.device)
    top_k_N = torch.full_like(rows, vocab) if rules.top_k_N is None else rules.top_k_N
    top_k_N = torch.where(top_k_N > 0, top_k_N, vocab)
    top_p_N = scores_NV.new_ones(len(rows)) if rules.top_p_N is None else rules.top_p_N.to(scores_NV.dtype)
    row_R = rows[(top_k_N < vocab) | (top_p_N < 1)]
    sorted_RV, order_RV = scores_NV[row_R].sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=scores_NV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_N[row_R, None], -torch.inf)
    share_RV = sorted_RV.softmax(-1)
    before_RV = share_RV.cumsum(-1) - share_RV
    cut_RV = before_RV >= top_p_N[row_R, None]
    # The best token stays whatever rounding says, and top_p 1 cuts nothing.
    cut_RV[:, 0] = False
    cut_RV &= top_p_N[row_R, None] < 1
    sorted_RV = sorted_RV.masked_fill(cut_RV, -torch.inf)
    scores_NV[row_R] = torch.empty_like(sorted_RV).scatter_(-1, order_RV, sorted_RV)


def _signed(value: int) -> int:
    """Return a 32-bit word as the number that int32 calls it."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(h_NV: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, which int32 does not do by itself."""
    return (h_NV >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _splitmix64(x_N: Tensor) -> Tensor:
    x_N = x_N + _signed64(0x9E3779B97F4A7C15)
    x_N = (x_N ^ _shift64(x_N, 30)) * _signed64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ _shift64(x_N, 27)) * _signed64(0x94D049BB133111EB)
    return x_N ^ _shift64(x_N, 31)


def _signed64(value: int) -> int:
    return value - (1 << 64)


def _shift64(x_N: Tensor, bits: int) -> Tensor:
    return (x_N >> bits) & ((1 << (64 - bits)) - 1)
