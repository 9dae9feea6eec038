"""Sampling for many rows at once. Rules that a row does not use leave its values bit-identical."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.sampling.rules import NO_TOKEN, Penalties, Rules

LARGEST = 1 - 2.0**-24
"""As in reference.py."""
CACHED = 1 << 16
"""Random words per step, so that each pass finds them in the cache."""
Noise = Callable[[Tensor, Tensor, int], Tensor]
"""The noise function: `gumbel`, or another implementation of it."""
GUESS = 256
"""Tokens ranked first if only top_p bounds them; more are rarely needed."""


def gumbel(seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor:
    """Return the noise [N, V] of every token at each row's position; reference.py has the formula."""
    key_N = keys(seed_N, position_N)
    rows = max(1, CACHED // vocab) if key_N.device.type == "cpu" else len(key_N)
    if rows >= len(key_N):
        return _noise(words(key_N, vocab))
    return torch.cat([_noise(words(part, vocab)) for part in torch.split(key_N, rows)])


def process(logits_NV: Tensor, rules: Rules) -> Tensor:
    return filtered(_adjusted(logits_NV, rules), rules)


def _adjusted(logits_NV: Tensor, rules: Rules) -> Tensor:
    """Add biases and penalties."""
    scores_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if rules.bias is not None:
        value_E = rules.bias.value_E.to(scores_NV.dtype)
        scores_NV = scores_NV.index_put(rules.bias.at, value_E, accumulate=True)
    if rules.penalties is not None:
        at = rules.penalties.at
        scores_NV = scores_NV.index_put(at, _penalised(scores_NV[at], rules.penalties))
    return scores_NV


def filtered(scores_NV: Tensor, rules: Rules, *, out: Tensor | None = None) -> Tensor:
    """Apply everything after the penalties; `out` may be the scores themselves."""
    mask, is_random_N = rules.mask, rules.temperature_N > 0
    if mask is not None:
        cut_RV = (~unpack(mask.words_KW, scores_NV.shape[1]))[mask.set_R]
        masked_RV = scores_NV[mask.row_R].masked_fill_(cut_RV, -torch.inf)
        scores_NV = scores_NV.index_copy(0, mask.row_R, masked_RV)
    # Without `out` this always allocates, so the caller's logits are unchanged.
    warmth_N1 = torch.where(is_random_N, rules.temperature_N, 1).to(scores_NV.dtype)[:, None]
    scores_NV = torch.div(scores_NV, warmth_N1, out=out)
    if rules.min_p_N is not None:
        share_N = torch.where(is_random_N, rules.min_p_N, 0).to(scores_NV.dtype)
        least_N1 = scores_NV.amax(-1, keepdim=True) + share_N.log()[:, None]
        scores_NV.masked_fill_(scores_NV < least_N1, -torch.inf)
    if rules.top_k_N is not None or rules.top_p_N is not None:
        _cut_tail(scores_NV, rules, is_random_N)
    return scores_NV


def sample(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    return best_of(perturb(logits_NV, rules, seed_N, position_N))


def best_of(scores_NV: Tensor) -> Tensor:
    """Return each row's argmax, ties to the first; NO_TOKEN for rows with a NaN."""
    best_N = scores_NV.max(-1)  # ties go to the first, as `max` promises
    return best_N.indices.masked_fill(best_N.values.isnan(), NO_TOKEN)


def topk_with_noise(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    return topk(perturb(logits_NV, rules, seed_N, position_N), count)


def topk(scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    value_NC, token_NC = ranked(scores_NV, count)
    prob_NC = (value_NC - torch.logsumexp(scores_NV, -1, keepdim=True)).exp().nan_to_num_(0.0)
    return token_NC, prob_NC


def ranked(scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best scores and their tokens, ties to the smaller id; NaN ranks first."""
    vocab = scores_NV.shape[1]
    count = min(count, vocab)
    value_NC, token_NC = scores_NV.topk(min(count + 1, vocab))
    # `topk` does not specify the order of ties, and NaN compares false.
    is_sorted_N = (value_NC[:, :-1] > value_NC[:, 1:]).all(-1) & ~value_NC[:, 0].isnan()
    row_R = (~is_sorted_N).nonzero()[:, 0]
    if len(row_R):
        unsorted = zip(row_R.tolist(), value_NC[row_R].tolist(), token_NC[row_R].tolist(), strict=True)
        tokens = [_in_order(scores_NV[n], values, ids, count) for n, values, ids in unsorted]
        token_NC[row_R, :count] = torch.tensor(tokens, device=token_NC.device)
    return value_NC[:, :count], token_NC[:, :count]


def _in_order(scores_V: Tensor, values: Sequence[float], tokens: Sequence[int], count: int) -> list[int]:
    """Sort a row's `count` best tokens with ties to the smaller id, given `topk`'s result.

    `topk` took one more than `count` if there is one: only if that equals the last can other tokens belong.
    """
    if math.isnan(values[0]):
        order: list[int] = scores_V.sort(dim=-1, descending=True, stable=True).indices[:count].tolist()
        return order
    least = values[count - 1]
    ordered = sorted((-value, token) for value, token in zip(values, tokens, strict=True))
    if values[-1] < least or len(values) == count:
        return [token for _, token in ordered[:count]]
    above = [token for value, token in ordered if -value > least]
    # Everything not above -inf equals it, so the first tokens suffice to fill the list.
    candidates_V = scores_V[: 2 * count] if least == -math.inf else scores_V
    equal: list[int] = (candidates_V == least).nonzero()[: count - len(above), 0].tolist()
    return [*above, *equal]


def perturb(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, noise: Noise = gumbel
) -> Tensor:
    """Return processed logits plus noise; the logits themselves if no row has rules."""
    row_R = rules.temperature_N.nonzero()[:, 0]
    if not len(row_R) and rules.is_uniform:
        return logits_NV
    scores_NV = process(logits_NV, rules)
    noise_RV = noise(seed_N[row_R], position_N[row_R], scores_NV.shape[1])
    if len(row_R) == len(scores_NV):
        return scores_NV.add_(noise_RV)
    return scores_NV.index_add_(0, row_R, noise_RV.to(scores_NV.dtype))


def unpack(words_RW: Tensor, vocab: int) -> Tensor:
    """Return the bits of words, lowest first, as booleans [R, V]."""
    bit_B = torch.arange(32, dtype=torch.int32, device=words_RW.device)
    return (words_RW[:, :, None] >> bit_B & 1).bool().flatten(1)[:, :vocab]


def _penalised(score_E: Tensor, penalties: Penalties) -> Tensor:
    count_E, (repetition_E, presence_E, frequency_E) = penalties.count_E, penalties.factors
    penalised_E = torch.where(score_E > 0, score_E / repetition_E, score_E * repetition_E)
    loss_E = frequency_E * count_E + presence_E * (count_E > 0)
    return (penalised_E - loss_E).to(score_E.dtype)


def _cut_tail(scores_NV: Tensor, rules: Rules, is_random_N: Tensor) -> None:
    """Cut to the best k, and of those to the best with a total of top_p; ties go to the smaller id.

    Rows with neither are skipped. Reads on the host how far the ranking must go.
    """
    vocab = scores_NV.shape[1]
    top_k_N, top_p_N = torch.full_like(is_random_N, vocab, dtype=torch.int64), rules.top_p_N
    if rules.top_k_N is not None:
        top_k_N = torch.where(rules.top_k_N > 0, rules.top_k_N.clamp(max=vocab), top_k_N)
    is_filtered_N = top_k_N < vocab
    if top_p_N is not None:
        top_p_N = top_p_N.to(scores_NV.dtype)
        is_filtered_N |= top_p_N < 1
    row_R = (is_random_N & is_filtered_N).nonzero()[:, 0]
    if len(row_R) == len(scores_NV):
        scores_NV.masked_fill_(_cut(scores_NV, top_k_N, top_p_N), -torch.inf)
    elif len(row_R):
        scores_RV = scores_NV[row_R]
        cut_RV = _cut(scores_RV, top_k_N[row_R], None if top_p_N is None else top_p_N[row_R])
        scores_NV[row_R] = scores_RV.masked_fill_(cut_RV, -torch.inf)


def _cut(scores_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor | None) -> Tensor:
    """Return which tokens of each row are cut: those below the last kept score, and its later ties.

    NaN is neither, and is left for the choice to detect.
    """
    if top_p_R is None:
        best_RC, count_R = scores_RV.topk(int(top_k_R.max())).values, top_k_R
    else:
        best_RC, count_R = _nucleus(scores_RV, top_k_R, top_p_R)
    # The best token stays even if top_p rounds to 0 or a score is NaN.
    count_R = count_R.clamp(min=1)
    least_R1 = best_RC.gather(-1, count_R[:, None] - 1)
    equal_RV = scores_RV == least_R1
    room_R1 = count_R[:, None] - (best_RC > least_R1).sum(-1, keepdim=True)
    return (scores_RV < least_R1) | (equal_RV & (equal_RV.cumsum(-1, dtype=torch.int32) > room_R1))


def _nucleus(scores_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's best scores and how many of them stay: the fewest that reach top_p.

    Masses are in units of the best token's weight, summed from it on, and so do not depend on the ranking's
    width.
    """
    vocab = scores_RV.shape[1]
    is_open_R = top_k_R == vocab
    weight_R = scores_RV.softmax(-1).amax(-1).reciprocal()
    width = min(vocab, int(top_k_R.masked_fill(is_open_R, GUESS).max()))
    while True:
        best_RC = scores_RV.topk(width).values
        mass_RC = (best_RC - best_RC[:, :1]).exp_().cumsum(-1)
        within_R = mass_RC.gather(-1, top_k_R.clamp(max=width)[:, None] - 1)[:, 0]
        goal_R = top_p_R * torch.where(is_open_R, weight_R, within_R)
        goal_R = goal_R.masked_fill(top_p_R >= 1, torch.inf)
        before_RC = torch.nn.functional.pad(mass_RC[:, :-1], (1, 0))
        rank_C = torch.arange(width, device=scores_RV.device)
        count_R = ((before_RC < goal_R[:, None]) & (rank_C < top_k_R[:, None])).sum(-1)
        if width == vocab or not bool((is_open_R & (count_R == width)).any()):
            return best_RC, count_R
        width = min(vocab, 8 * width)


def _noise(h_NV: Tensor) -> Tensor:
    """Convert words to standard Gumbel noise."""
    w_NV = h_NV.view(torch.uint32).float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST)
    return w_NV.neg_().log1p_().neg_().log_().neg_()


def keys(seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Mix seed and position into 64 bits: the key in the low half, the tweak in the high half."""
    return splitmix64(splitmix64(seed_N + 1) ^ position_N)


def words(key_N: Tensor, vocab: int) -> Tensor:
    """Return the 32 random bits of every token, as int32, from each row's int64 of key and tweak."""
    key_N1, tweak_N1 = key_N.view(torch.int32).view(-1, 2, 1).unbind(1)
    h_NV = torch.arange(vocab, dtype=torch.int32, device=key_N.device) * _signed(0x9E3779B1) + key_N1
    scratch_NV = torch.empty_like(h_NV)
    _fold(h_NV, 16, scratch_NV)
    h_NV *= _signed(0x85EBCA6B)
    _fold(h_NV, 13, scratch_NV)
    h_NV += tweak_N1
    h_NV *= _signed(0xC2B2AE35)
    _fold(h_NV, 16, scratch_NV)
    h_NV *= _signed(0x27D4EB2F)
    _fold(h_NV, 15, scratch_NV)
    return h_NV


def _fold(h_NV: Tensor, bits: int, scratch_NV: Tensor) -> None:
    """Xor with itself shifted right; the mask clears the sign bits that int32 shifts in."""
    torch.bitwise_right_shift(h_NV, bits, out=scratch_NV)
    h_NV ^= scratch_NV.bitwise_and_((1 << (32 - bits)) - 1)


def _signed(value: int) -> int:
    """Return a 32-bit word as a signed integer."""
    return value - (1 << 32) if value >= 1 << 31 else value


def splitmix64(x_N: Tensor) -> Tensor:
    x_N = x_N + (0x9E3779B97F4A7C15 - (1 << 64))
    x_N = (x_N ^ _shift64(x_N, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x_N = (x_N ^ _shift64(x_N, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x_N ^ _shift64(x_N, 31)


def _shift64(x_N: Tensor, bits: int) -> Tensor:
    return (x_N >> bits) & ((1 << (64 - bits)) - 1)
