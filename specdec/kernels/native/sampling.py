"""Noise and ranking over a whole vocabulary, a few rows at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.native.call import function, pointer
from specdec.kernels.native.compiled import RANKED
from specdec.kernels.native.signatures import SUFFIX
from specdec.kernels.sampling import cpu
from specdec.kernels.sampling.rules import Rules


def gumbel(seed_N: Tensor, position_N: Tensor, vocab: int) -> Tensor:
    """Return the noise [N, V] of every token; computed once per seed and position, which siblings share."""
    if not seed_N.is_cpu:
        return cpu.gumbel(seed_N, position_N, vocab)
    if len(seed_N) == 1:
        return _noise(seed_N, position_N, vocab)
    place_R2, row_N = torch.unique(torch.stack([seed_N, position_N], 1), dim=0, return_inverse=True)
    seed_R, position_R = place_R2.t().contiguous().unbind()
    return _noise(seed_R, position_R, vocab)[row_N]


def _noise(seed_R: Tensor, position_R: Tensor, vocab: int) -> Tensor:
    noise_RV = torch.empty(len(seed_R), vocab, dtype=torch.float32)
    function("gumbel")(pointer(seed_R), pointer(position_R), *noise_RV.shape, pointer(noise_RV))
    return noise_RV


def process(logits_NV: Tensor, rules: Rules) -> Tensor:
    """Apply the sampling rules as `cpu.process` does, with biases and penalties in one pass per row."""
    bias, penalties = rules.bias, rules.penalties
    is_served = logits_NV.is_cpu and logits_NV.dtype in SUFFIX
    if not is_served or (bias is None and penalties is None):
        return cpu.process(logits_NV, rules)
    logits_NV = logits_NV.contiguous()
    scores_NV = torch.empty(logits_NV.shape, dtype=torch.float32)
    function("adjust", logits_NV.dtype)(
        *(pointer(logits_NV), *logits_NV.shape),
        *_columns(bias or (None,) * 4),
        *_columns(penalties or (None,) * 7),
        pointer(scores_NV),
    )
    return cpu.filtered(scores_NV, rules, out=scores_NV)


def _columns(columns: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    """Return the number of rows and the columns' addresses."""
    rows = columns[0]
    return 0 if rows is None else len(rows), *map(pointer, columns)


def sample(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Return each row's best token as `cpu.sample` does, with the noise computed in C."""
    scores_NV = _perturb(logits_NV, rules, seed_N, position_N)
    if not _is_ranked(scores_NV, 1):
        return cpu.best_of(scores_NV)
    return _top(scores_NV, 1, None)[:, 0]


def topk_with_noise(
    logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return best tokens and probabilities as `cpu.topk_with_noise` does, with the noise computed in C."""
    return topk(_perturb(logits_NV, rules, seed_N, position_N), count)


def topk(scores_NV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens and their probabilities in one pass per row."""
    count = min(count, scores_NV.shape[1])
    if not _is_ranked(scores_NV, count):
        return cpu.topk(scores_NV, count)
    share_NC = torch.empty(len(scores_NV), count, dtype=torch.float32)
    return _top(scores_NV, count, share_NC), share_NC


def _is_ranked(scores_NV: Tensor, count: int) -> bool:
    return scores_NV.is_cpu and scores_NV.dtype == torch.float32 and count <= RANKED


def _top(scores_NV: Tensor, count: int, share_NC: Tensor | None) -> Tensor:
    scores_NV = scores_NV.contiguous()
    token_NC = torch.empty(len(scores_NV), count, dtype=torch.int64)
    function("topk")(pointer(scores_NV), *scores_NV.shape, count, pointer(token_NC), pointer(share_NC))
    return token_NC


def _perturb(logits_NV: Tensor, rules: Rules, seed_N: Tensor, position_N: Tensor) -> Tensor:
    """Return perturbed scores as `cpu.perturb` does; without biases, penalties and masks in one call."""
    if not (logits_NV.is_cpu and logits_NV.dtype in SUFFIX and rules.is_uniform):
        return cpu.perturb(logits_NV, rules, seed_N, position_N, gumbel)
    logits_NV, filters = logits_NV.contiguous(), rules.filters
    scratch = 1 if all(column is None for column in filters) else 4
    scratch_XV = torch.empty(scratch, logits_NV.shape[1], dtype=torch.float32)
    scores_NV = torch.empty(logits_NV.shape, dtype=torch.float32)
    columns = [
        None if column is None else column.contiguous()
        for column in (rules.temperature_N, *filters, seed_N, position_N)
    ]
    function("perturb", logits_NV.dtype)(
        *(pointer(logits_NV), *logits_NV.shape, *map(pointer, columns)),
        *(pointer(scratch_XV), pointer(scores_NV)),
    )
    return scores_NV
