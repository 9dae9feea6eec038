"""Choose one token at each node: the argmax of processed logits plus the noise of (seed, position, token).

Nothing of a batch, a slot or a step enters, so a node's choice is what plain sampling with its seed gives.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.kernels.sampling.rules import Bias, Penalties, Rules
from specdec.kernels.table import Kernels

SEED_STEP = 0x9E3779B97F4A7C15
"""Odd and far from a power of two, so that the choices of neighbouring seeds do not meet."""


class Chooser:
    """One request's rule of choice. Only `observe` changes it: it counts accepted tokens."""

    def __init__(self, params: SamplingParams, *, seed: int, prompt: Sequence[int], vocab: int) -> None:
        self.params, self.seed, self.vocab = params, seed, vocab
        self.is_penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.is_plain = params.temperature == 0 and not self.is_penalised and not params.logit_bias
        self.seen: set[int] = set(prompt) if self.is_penalised else set()
        self.counts: Counter[int] = Counter()

    def observe(self, token: int) -> None:
        """Count a token that the request has accepted."""
        if self.is_penalised:
            self.seen.add(token)
            self.counts[token] += 1


@dataclass(frozen=True, slots=True)
class Node:
    """A place where a token is to be chosen: for whom, where in the text, after which drafted tokens."""

    chooser: Chooser
    position: int
    path: tuple[int, ...] = ()
    """The drafted tokens from the root's child to this node, which the chooser has not observed."""


class Logprob(NamedTuple):
    """Log-probabilities under the raw logits: the chosen token's, and those of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Choice(NamedTuple):
    token: int
    logprob: Logprob | None


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one of several choices; the first is the request's own."""
    mixed = (seed + index * SEED_STEP) & ((1 << 64) - 1)
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def choose(logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels) -> list[Choice]:
    """Choose a token at each node, given its logits."""
    if all(node.chooser.is_plain for node in nodes):
        tokens = logits_NV.argmax(-1).tolist()
    else:
        scores_NV = kernels.process(logits_NV, _rules(nodes, logits_NV))
        _add_noise(scores_NV, nodes, kernels)
        tokens = scores_NV.argmax(-1).tolist()
    logprobs = _logprobs(logits_NV, nodes, tokens)
    return [Choice(token, logprobs.get(n)) for n, token in enumerate(tokens)]


def _add_noise(scores_NV: Tensor, nodes: Sequence[Node], kernels: Kernels) -> None:
    sampled = [n for n, node in enumerate(nodes) if node.chooser.params.temperature > 0]
    if not sampled:
        return
    device = scores_NV.device
    seed_R = torch.tensor([nodes[n].chooser.seed for n in sampled], device=device)
    position_R = torch.tensor([nodes[n].position for n in sampled], device=device)
    noise_RV = kernels.gumbel(seed_R, position_R, scores_NV.shape[1])
    if len(sampled) == len(nodes):
        scores_NV += noise_RV
    else:
        scores_NV[torch.tensor(sampled, device=device)] += noise_RV.to(scores_NV.dtype)


def _rules(nodes: Sequence[Node], logits_NV: Tensor) -> Rules:
    """Gather the nodes' parameters; a part that none of them uses stays None."""
    params, device = [node.chooser.params for node in nodes], logits_NV.device

    def column(values: list[float], off: float) -> Tensor | None:
        used = any(value != off for value in values)
        return torch.tensor(values, dtype=logits_NV.dtype, device=device) if used else None

    top_k = [max(p.top_k, 0) for p in params]
    return Rules(
        temperature_N=torch.tensor([p.temperature for p in params], dtype=logits_NV.dtype, device=device),
        top_k_N=torch.tensor(top_k, device=device) if any(top_k) else None,
        top_p_N=column([p.top_p for p in params], 1.0),
        min_p_N=column([p.min_p for p in params], 0.0),
        bias=_bias(params, logits_NV),
        penalties=_penalties(nodes, logits_NV),
    )


def _bias(params: Sequence[SamplingParams], logits_NV: Tensor) -> Bias | None:
    entries = [
        (n, token, value) for n, p in enumerate(params) for token, value in (p.logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    device = logits_NV.device
    return Bias(
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=logits_NV.dtype, device=device),
    )


def _penalties(nodes: Sequence[Node], logits_NV: Tensor) -> Penalties | None:
    """Count what each penalised node has seen: its request's tokens and its own path's."""
    rows = [n for n, node in enumerate(nodes) if node.chooser.is_penalised]
    if not rows:
        return None
    seen_RV = torch.zeros(len(rows), logits_NV.shape[1], dtype=torch.bool)
    count_RV = torch.zeros(len(rows), logits_NV.shape[1], dtype=logits_NV.dtype)
    for r, n in enumerate(rows):
        chooser, path = nodes[n].chooser, nodes[n].path
        counts = chooser.counts + Counter(path)
        seen_RV[r, list(chooser.seen.union(path))] = True
        count_RV[r, list(counts)] = torch.tensor(list(counts.values()), dtype=count_RV.dtype)
    params, device = [nodes[n].chooser.params for n in rows], logits_NV.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=logits_NV.dtype, device=device)

    return Penalties(
        torch.tensor(rows, device=device),
        seen_RV.to(device),
        count_RV.to(device),
        column([p.repetition_penalty for p in params]),
        column([p.presence_penalty for p in params]),
        column([p.frequency_penalty for p in params]),
    )


def _logprobs(logits_NV: Tensor, nodes: Sequence[Node], tokens: Sequence[int]) -> dict[int, Logprob]:
    asking = [n for n, node in enumerate(nodes) if node.chooser.params.logprobs is not None]
    if not asking:
        return {}
    most = max(nodes[n].chooser.params.logprobs or 0 for n in asking)
    logprobs_RV = logits_NV[torch.tensor(asking, device=logits_NV.device)].log_softmax(-1)
    values_RK, ids_RK = logprobs_RV.topk(min(most, logprobs_RV.shape[1]), dim=-1)
    found = {}
    for r, (n, values, ids) in enumerate(zip(asking, values_RK.tolist(), ids_RK.tolist(), strict=True)):
        wanted = nodes[n].chooser.params.logprobs
        found[n] = Logprob(float(logprobs_RV[r, tokens[n]]), tuple(zip(ids, values, strict=True))[:wanted])
    return found
