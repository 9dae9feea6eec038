"""Noise and ranking over a whole vocabulary, a few rows at a time."""

import torch
from torch import Tensor

from specdec.kernels.native.call import function
from specdec.kernels.sampling import cpu
from specdec.kernels.sampling.rules import Rules

RANKED = 64
"""The longest ranking that is kept in order by insertion."""


def gumbel(seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor:
    """Return the noise [N, V] of every token at each row's position, each place of a tree's siblings once."""
    if not seed_N.is_cpu:
        return cpu.gumbel(seed_N, position_N, vocab)
    if len(seed_N) == 1:
        return _noise(seed_N, position_N, vocab)
    place_R2, row_N = torch.unique(torch.stack([seed_N, position_N], 1), dim=0, return_inverse=True)
    seed_R, position_R = place_R2.t().contiguous().unbind()
    return _noise(seed_R, position_R, vocab)[row_N]


def _noise(seed_R: Tensor, position_R: Tensor, vocab: int) -> Tensor:
    noise_RV = torch.empty(len(seed_R), vocab, dtype=torch.float32)
    function("gumbel")(seed_R.data_ptr(), position_R.data_ptr(), *noise_RV.shape, noise_RV.data_ptr())
    return noise_RV


def pick(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Return each row's best token, as `cpu.pick` does, with this file's noise."""
    return cpu.pick(logits_NV, rules, seed_N, position_N, gumbel)


def best(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the best tokens and their shares, as `cpu.best` does, with this file's noise."""
    return top(cpu.perturb(logits_NV, rules, seed_N, position_N, gumbel), count)


def top(scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens and their shares in one pass over each row."""
    rows, vocab = scores_NV.shape
    count = min(count, vocab)
    if not scores_NV.is_cpu or scores_NV.dtype != torch.float32 or count > RANKED:
        return cpu.top(scores_NV, count)
    scores_NV = scores_NV.contiguous()
    token_NC = torch.empty(rows, count, dtype=torch.int64)
    share_NC = torch.empty(rows, count, dtype=torch.float32)
    is_odd = function("top")(
        *(scores_NV.data_ptr(), rows, vocab, count),
        *(token_NC.data_ptr(), share_NC.data_ptr()),
    )
    return cpu.top(scores_NV, count) if is_odd else (token_NC, share_NC)
