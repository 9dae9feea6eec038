"""Sampling on a GPU: one pass over the logits if no row filters, and no host synchronisation.

Each program handles one part of a vocabulary. It computes the part's scores and noise in registers and writes
its best tokens; a second kernel merges the parts. Comparisons use one integer of score and token, which
orders ties by smaller id and NaN first.

The random words match reference.py bit for bit. The noise is computed from them in float32 like cpu.py's, to
within 2e-6, relative or absolute: the device's logarithms round differently.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.launch import kernel, overlap
from specdec.kernels.sampling import cpu
from specdec.kernels.sampling.rules import Rules

PART = 2048
"""Tokens of a vocabulary per program."""
ROW = 8192
"""Tokens per load of a filtered row, which has one program."""
NONE = tl.constexpr(-(2**63))
"""A key below all tokens' keys."""


def sample(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Sample as the reference does; penalties, biases and float64 run in cpu.py."""
    if not _is_ours(logits_NV, rules):
        return cpu.sample(logits_NV, rules, seed_N, position_N)
    token_NC, _ = _best(logits_NV, rules, seed_N, position_N, 1, ranks=False)
    return token_NC[:, 0]


def topk_with_noise(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens by the scores of `sample`, and their softmax probabilities.

    Ties go to the smaller id. NaN ranks first; it makes all probabilities of its row 0. Penalties, biases and
    float64 run in cpu.py.
    """
    if not _is_ours(logits_NV, rules):
        return cpu.topk_with_noise(logits_NV, rules, seed_N, position_N, count)
    return _best(logits_NV, rules, seed_N, position_N, min(count, logits_NV.shape[1]), ranks=True)


def _is_ours(logits_NV: Tensor, rules: Rules) -> bool:
    return logits_NV.dtype != torch.float64 and rules.is_uniform


def _best(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int, *, ranks: bool
) -> tuple[Tensor, Tensor]:
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1
    columns = rules.temperature_N, rules.top_k_N, rules.top_p_N, rules.min_p_N
    assert all(column_N is None or column_N.is_contiguous() for column_N in columns)
    stride, device, parts = logits_NV.stride(0), logits_NV.device, triton.cdiv(vocab, PART)
    least_N, last_N = _limits(logits_NV, rules)
    key_NPC = torch.empty(rows, parts, count, dtype=torch.int64, device=device)
    sum_NP = torch.empty(rows, parts, dtype=torch.float32, device=device)
    _part[(rows, parts)](
        *(logits_NV, rules.temperature_N, seed_N.contiguous(), position_N.contiguous(), least_N, last_N),
        *(key_NPC, sum_NP, stride, vocab, parts),
        COUNT=count,
        RANKS=ranks,
        BLOCK=PART,
        num_warps=8,
    )
    token_NC = torch.empty(rows, count, dtype=torch.int64, device=device)
    prob_NC = torch.empty(rows, count, dtype=torch.float32, device=device)
    _merge[(rows,)](
        *(key_NPC, sum_NP, token_NC, prob_NC, parts),
        COUNT=count,
        RANKS=ranks,
        PARTS=triton.next_power_of_2(parts),
        KEYS=triton.next_power_of_2(parts * count),
        num_warps=4,
    )
    return token_NC, prob_NC


def _limits(logits_NV: Tensor, rules: Rules) -> tuple[Tensor | None, Tensor | None]:
    """Return each row's lowest score that passes its filters, and the last token kept at that score."""
    filters = rules.top_k_N, rules.top_p_N, rules.min_p_N
    if all(column_N is None for column_N in filters):
        return None, None
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    least_N = torch.empty(rows, dtype=torch.float32, device=device)
    last_N = torch.empty(rows, dtype=torch.int32, device=device)
    # Use one kernel for all filters, with unused ones set to off: each combination would compile anew.
    defaults = zip(filters, (0, 1.0, 0.0), (torch.int64, torch.float32, torch.float32), strict=True)
    columns = (
        torch.full((rows,), off, dtype=kind, device=device) if x is None else x for x, off, kind in defaults
    )
    _cut[(rows,)](
        *(logits_NV, rules.temperature_N, *columns, least_N, last_N, logits_NV.stride(0), vocab),
        BLOCK=ROW,
        num_warps=16,
    )
    return least_N, last_N


@kernel(do_not_specialize_on_alignment=["temperature", "seed", "position"])
def _part(
    logits, temperature, seed, position, least, last, key, total, stride, vocab, parts,
    COUNT: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a part's best keys, best first, and for ranking its sum of exponentials over the best score."""
    overlap()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    score = tl.load(logits + row * stride + at, mask=inside, other=-float("inf")).to(tl.float32)
    temp = tl.load(temperature + row)
    if temp > 0:
        score = tl.div_rn(score, temp)
        if least is not None:
            bound, end = tl.load(least + row), tl.load(last + row)
            score = tl.where((score < bound) | ((score == bound) & (at > end)), -float("inf"), score)
        score += _noise(_word(tl.load(seed + row), tl.load(position + row), at))
    keys = tl.where(inside, _key(score, at), NONE)
    out = row * parts + part
    for i in tl.static_range(COUNT):
        first = tl.max(keys, 0)
        tl.store(key + out * COUNT + i, first)
        keys = tl.where(keys == first, NONE, keys)
        if RANKS and i == 0:
            most = _score(first)
            most = tl.where(most == -float("inf"), 0.0, most)
            tl.store(total + out, tl.sum(tl.where(inside, tl.exp(score - most), 0.0), 0))


@kernel
def _merge(
    key, total, token, share, parts,
    COUNT: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """Merge the parts' best into one list. Without ranking, NaN gives -1."""
    overlap()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, KEYS)
    keys = tl.load(key + row * parts * COUNT + at, mask=at < parts * COUNT, other=NONE)
    if RANKS:
        part = tl.arange(0, PARTS)
        inside = part < parts
        part_best = _score(tl.load(key + (row * parts + part) * COUNT, mask=inside, other=NONE))
        most = _score(tl.max(keys, 0))
        sums = tl.load(total + row * parts + part, mask=inside, other=0.0)
        total_sum = tl.sum(tl.where(inside, sums * tl.exp(part_best - most), 0.0), 0)
    for i in tl.static_range(COUNT):
        first = tl.max(keys, 0)
        keys = tl.where(keys == first, NONE, keys)
        token_id = 0x7FFFFFFF - (first & 0x7FFFFFFF)
        if RANKS:
            part_of = tl.exp(_score(first) - most) / total_sum
            tl.store(share + row * COUNT + i, tl.where(part_of == part_of, part_of, 0.0))
        else:
            token_id = tl.where(first >> 32 == 0x7FFFFFFF, -1, token_id)
        tl.store(token + row * COUNT + i, token_id)


@kernel
def _cut(
    logits, temperature, top_k, top_p, min_p, least, last, stride, vocab,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Find a row's lowest kept score, and the last token kept at that score.

    A filtered row is read, from the cache, once per bisection step between two of its scores.
    """
    overlap()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temp = tl.load(temperature + row)
    k, p, least_ratio = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    k_limit = tl.where((k > 0) & (k < vocab), k, vocab).to(tl.int32)
    bound, end = tl.cast(-float("inf"), tl.float32), vocab
    if (temp > 0) & ((k_limit < vocab) | (p < 1) | (least_ratio > 0)):
        highest = _highest(logits, temp, vocab, BLOCK)
        if highest > -float("inf"):
            if least_ratio > 0:
                bound = highest + tl.log(least_ratio)
            # Number of the bound's ties that stay and that are cut.
            ties, extra_ties = vocab, tl.cast(0.0, tl.float64)
            if k_limit < vocab:
                count, score, _ = _above(logits, temp, highest, vocab, bound, False, BLOCK)
                if k_limit < count:
                    bound, above, from_bound = _search(
                        logits, temp, highest, vocab, score, count, k_limit.to(tl.float64), False, BLOCK
                    )
                    ties, extra_ties = k_limit - above.to(tl.int32), from_bound - k_limit
            if (p < 1) & (highest < float("inf")):
                mass, score, _ = _above(logits, temp, highest, vocab, bound, True, BLOCK)
                if extra_ties > 0:
                    mass -= extra_ties * tl.exp(bound - highest).to(tl.float64)
                target = p.to(tl.float64) * mass
                score, above, _ = _search(logits, temp, highest, vocab, score, mass, target, True, BLOCK)
                needed = _ceil((target - above) / tl.exp(score - highest).to(tl.float64), vocab)
                ties = tl.where(score == bound, tl.minimum(needed, ties), needed)
                bound = score
            if ties < vocab:
                end = _nth(logits, temp, vocab, bound, ties, BLOCK)
    tl.store(least + row, bound)
    tl.store(last + row, end)


@triton.jit
def _search(
    logits, temp, highest, vocab, low, at_low, target,
    MASS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the greatest score whose amount, with all scores above it, reaches the goal.

    `low` reaches it, with the amount `reached`. Return the score, the amount above it, and the amount
    including it. Both ends of the bisection are always scores of the row.
    """
    high, above_high = highest, tl.cast(0.0, tl.float64)
    while low < high:
        mid = low + (high - low) * 0.5
        mid = tl.where((mid > low) & (mid < high), mid, high)
        mass, above, below = _above(logits, temp, highest, vocab, mid, MASS, BLOCK)
        if mass >= target:
            low, at_low = above, mass
        else:
            high, above_high = below, mass
    return low, above_high, at_low


@triton.jit
def _above(logits, temp, highest, vocab, bound, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the count or mass of scores from a bound on, the lowest of them, and the highest below."""
    masses = tl.zeros([BLOCK], tl.float64)
    above, below = (
        tl.full([BLOCK], float("inf"), tl.float32),
        tl.full([BLOCK], -float("inf"), tl.float32),
    )
    for start in range(0, vocab, BLOCK):
        score = _load(logits, temp, vocab, start, BLOCK)
        is_in = (score >= bound) & (score > -float("inf"))
        mass = tl.exp(score - highest) if MASS else tl.full([BLOCK], 1.0, tl.float32)
        masses += tl.where(is_in, mass, 0.0).to(tl.float64)
        above = tl.minimum(above, tl.where(is_in, score, float("inf")))
        below = tl.maximum(below, tl.where(is_in, -float("inf"), score))
    return tl.sum(masses, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _highest(logits, temp, vocab, BLOCK: tl.constexpr):
    """Return a row's highest score; -inf if the row has a NaN."""
    highest, has_nan = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        score = _load(logits, temp, vocab, start, BLOCK)
        has_nan |= (score != score).to(tl.int32)
        highest = tl.maximum(highest, tl.where(score == score, score, -float("inf")))
    return tl.where(tl.max(has_nan, 0) > 0, -float("inf"), tl.max(highest, 0))


@triton.jit
def _nth(logits, temp, vocab, bound, n, BLOCK: tl.constexpr):
    """Return the n-th token with a score; the vocabulary size if there are fewer."""
    token_id, seen = vocab, 0
    for start in range(0, vocab, BLOCK):
        equal = (_load(logits, temp, vocab, start, BLOCK) == bound).to(tl.int32)
        is_it = (equal > 0) & (seen + tl.cumsum(equal, 0) == n)
        token_id = tl.minimum(token_id, tl.min(tl.where(is_it, start + tl.arange(0, BLOCK), vocab), 0))
        seen += tl.sum(equal, 0)
    return token_id


@triton.jit
def _load(logits, temp, vocab, start, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.div_rn(tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32), temp)


@triton.jit
def _ceil(number, most):
    """Round up to an integer between 1 and `most`."""
    return tl.ceil(tl.minimum(tl.maximum(number, 1.0), most.to(tl.float64))).to(tl.int32)


@triton.jit
def _key(score, token):
    """Pack a score and its token into one ordered integer: NaN first, then by score, then smaller id."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    order = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _score(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _word(seed, position, token):
    """Return the 32 random bits of each token at one position."""
    mixed = splitmix64(splitmix64((seed + 1).to(tl.uint64)) ^ position.to(tl.uint64))
    h = token.to(tl.uint32) * 0x9E3779B1 + mixed.to(tl.uint32)
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h += (mixed >> 32).to(tl.uint32)
    h *= 0xC2B2AE35
    h ^= h >> 16
    h *= 0x27D4EB2F
    return h ^ (h >> 15)


@triton.jit
def splitmix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise(h):
    """Convert words to standard Gumbel noise, correcting the logarithm for the rounding of 1 - w."""
    w = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    rest = 1.0 - w
    lost = (rest - 1.0) + w
    return -tl.log(lost / rest - tl.log(rest))
