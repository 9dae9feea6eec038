"""Sampling as the argmax of logits plus noise, row by row and in Python integers.

The noise of token v at position p under seed s is a pure function of (s, p, v). Two 32-bit keys are

    a = splitmix64(s + 1),  b = splitmix64(a xor p),  key = low half of b,  tweak = high half of b

and the token's word is three rounds of multiply and shift (all modulo 2^32):

    h = v * 0x9E3779B1 + key;  h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13
    h += tweak;                h *= 0xC2B2AE35;  h ^= h >> 16;  h *= 0x27D4EB2F;  h ^= h >> 15

With w = (h + 1/2) / 2^32 in (0, 1), the noise is −log(−log(1 − w)): for large noise w is small and has full
precision.
"""

import math

import torch
from torch import Tensor

from specdec.kernels.sampling.rules import Penalties, Rules

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
LARGEST = 1 - 2.0**-24
"""Upper bound of w: rounded to 1 it would make the noise minus infinity."""


def gumbel(seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor:
    """Return the noise [N, V] of every token at each row's position."""
    rows = [
        [_noise(word(seed, position, token)) for token in range(vocab)]
        for seed, position in zip(seed_N.tolist(), position_N.tolist(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float32, device=seed_N.device).view(-1, vocab)


def process(logits_NV: Tensor, rules: Rules) -> Tensor:
    """Apply bias, penalties, mask, temperature, min_p, top_k, top_p in this order; cut tokens get -inf."""
    dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
    scores_NV = logits_NV.to(dtype, copy=True)
    for n, scores_V in enumerate(scores_NV):
        _process_row(scores_V, rules, n)
    return scores_NV


def sample(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Return each row's argmax of processed logits, plus noise at temperatures above 0; ties go to the first.

    Rows with a NaN return -1.
    """
    scores_NV = _perturb(logits_NV, rules, seed_N, position_N)
    tokens = [-1 if any(map(math.isnan, row)) else _ranked(row)[0] for row in scores_NV.tolist()]
    return torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device)


def topk_with_noise(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens by the scores of `sample`, and their softmax probabilities."""
    return topk(_perturb(logits_NV, rules, seed_N, position_N), count)


def topk(scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens, ties to the smaller id, and their softmax probabilities.

    NaN ranks first; it makes all probabilities of its row 0.
    """
    tokens = [_ranked(row)[:count] for row in scores_NV.tolist()]
    token_NC = torch.tensor(tokens, dtype=torch.int64, device=scores_NV.device)
    return token_NC, scores_NV.softmax(-1).nan_to_num(0.0).gather(-1, token_NC)


def splitmix64(x: int) -> int:
    """Mix 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def word(seed: int, position: int, token: int) -> int:
    """Return the 32 random bits of one token at one position."""
    mixed = splitmix64(splitmix64((seed + 1) & MASK64) ^ (position & MASK64))
    key, high = mixed & MASK32, mixed >> 32
    h = (token * 0x9E3779B1 + key) & MASK32
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & MASK32
    h ^= h >> 13
    h = (h + high) & MASK32
    h = (h * 0xC2B2AE35) & MASK32
    h ^= h >> 16
    h = (h * 0x27D4EB2F) & MASK32
    return h ^ (h >> 15)


def _noise(h: int) -> float:
    w = min((h + 0.5) / 2**32, LARGEST)
    return -math.log(-math.log1p(-w))


def _perturb(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    scores_NV = process(logits_NV, rules)
    noise_NV = gumbel(seed_N, position_N, scores_NV.shape[1])
    return scores_NV + torch.where(rules.temperature_N[:, None] > 0, noise_NV, 0.0)


def _ranked(scores: list[float]) -> list[int]:
    """Sort the tokens by score, NaN first."""
    keys = [(0, 0.0) if math.isnan(score) else (1, -score) for score in scores]
    return sorted(range(len(scores)), key=lambda v: (*keys[v], v))


def _process_row(scores_V: Tensor, rules: Rules, n: int) -> None:
    """Process row n in place. The filters skip rows with a NaN."""
    if rules.bias is not None:
        for row, token, value in zip(*rules.bias.at, rules.bias.value_E.tolist(), strict=True):
            scores_V[token] += value if row == n else 0.0
    if rules.penalties is not None:
        for e in (rules.penalties.at[0] == n).nonzero().flatten().tolist():
            _penalise(scores_V, rules.penalties, e)
    if rules.mask is not None:
        for r in (rules.mask.row_R == n).nonzero().flatten().tolist():
            words = rules.mask.words_KW[rules.mask.set_R[r]].tolist()
            for v in range(len(scores_V)):
                if not words[v // 32] >> v % 32 & 1:
                    scores_V[v] = -torch.inf
    if rules.temperature_N[n] == 0:
        return
    scores_V /= rules.temperature_N[n]
    if rules.min_p_N is not None and rules.min_p_N[n] > 0:
        scores_V[scores_V < scores_V.max() + rules.min_p_N[n].log()] = -torch.inf
    if scores_V.isnan().any():
        return
    order = _ranked(scores_V.tolist())
    if rules.top_k_N is not None and rules.top_k_N[n] > 0:
        scores_V[order[int(rules.top_k_N[n]) :]] = -torch.inf
    if rules.top_p_N is not None and rules.top_p_N[n] < 1:
        prob_V, before = scores_V.double().softmax(0), 0.0
        for v in order:
            if before >= float(rules.top_p_N[n]):
                scores_V[v] = -torch.inf
            before += float(prob_V[v])


def _penalise(scores_V: Tensor, penalties: Penalties, e: int) -> None:
    v, count = penalties.token_E[e], penalties.count_E[e]
    repetition, presence, frequency = (column_E[e] for column_E in penalties.factors)
    score = scores_V[v] / repetition if scores_V[v] > 0 else scores_V[v] * repetition
    scores_V[v] = score - (frequency * count + presence * (count > 0))
