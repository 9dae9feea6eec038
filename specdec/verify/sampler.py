"""Sample one token per node: argmax of processed logits plus noise keyed by (seed, position, token).

The result does not depend on batch, slot or step, so a node's token equals that of plain sampling with its
seed.
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.kernels.sampling.cpu import best_of
from specdec.kernels.sampling.reference import splitmix64
from specdec.kernels.sampling.rules import NO_TOKEN, Bias, Mask, Penalties, RowRule, Rules, make_column
from specdec.kernels.table import Kernels
from specdec.verify.limits import TokenLimit, bounded_words
from specdec.verify.logprobs import Logprob, logprobs_of
from specdec.verify.output_counts import OutputCounts

WAIT_S = 0.005
"""Seconds to wait for grammar masks, each time some of a step's nodes need them."""
HOTTEST = 1e30
"""Highest temperature that float32 handles; tokens are equally likely long before."""


def row_rule(params: SamplingParams) -> RowRule:
    """Return a request's parameters clamped to the ranges of tensors and kernels."""
    # The top_k bound exceeds any vocabulary and fits the kernels' integer type.
    return RowRule(
        temperature=min(float(params.temperature), HOTTEST),
        top_k=min(max(params.top_k, 0), 2**31),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
    )


class BiasColumns(NamedTuple):
    """A request's logit bias as int32 and float32 columns, which steps concatenate."""

    tokens: "array[int]"
    values: "array[float]"

    @classmethod
    def of(cls, params: SamplingParams) -> Self | None:
        """Return the columns, or None without a bias."""
        bias = params.logit_bias
        return cls(array("i", bias), array("f", bias.values())) if bias else None


class TokenSampler:
    """One request's sampler. Only `observe` mutates it: penalties and limits depend on the output."""

    __slots__ = ("bias", "history", "limits", "params", "rule", "seed")

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        limits: Sequence[TokenLimit] = (),
    ) -> None:
        self.params, self.rule, self.seed, self.limits = params, row_rule(params), seed, limits
        self.bias = BiasColumns.of(params)
        is_penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.history = OutputCounts(prompt) if is_penalised else None

    @property
    def ignores_history(self) -> bool:
        """Whether its choice depends only on logits and position."""
        return self.bias is None and self.history is None and not self.limits

    @property
    def is_greedy_plain(self) -> bool:
        """Whether it takes the argmax of the raw logits."""
        return self.params.temperature == 0 and self.ignores_history

    @property
    def runs_on_device(self) -> bool:
        """Whether its steps can run on the device: no history, and no log-probabilities."""
        return self.ignores_history and self.params.logprobs is None

    def observe(self, token: int) -> None:
        """Record an accepted token."""
        if self.history:
            self.history.observe(token)
        if self.limits:
            self.limits = [limit for limit in self.limits if limit.observe(token)]

    @property
    def is_over(self) -> bool:
        """Whether a limit is known to allow no further token."""
        return bool(self.limits) and any(limit.is_over for limit in self.limits)

    @property
    def fault(self) -> tuple[str, str] | None:
        """Field and reason if a limit allows no token and the output may not end."""
        if not self.limits:
            return None
        return next(((limit.field, limit.fault) for limit in self.limits if limit.fault), None)

    @property
    def is_slow(self) -> bool:
        """Whether a limit's mask was late recently, so that drafts would be too."""
        return bool(self.limits) and any(limit.is_slow for limit in self.limits)

    def knows(self, path: tuple[int, ...] = ()) -> bool:
        """Return whether the masks of all limits after a path are ready."""
        return not self.limits or all(limit.knows(path) for limit in self.limits)


@dataclass(frozen=True, slots=True)
class SamplingNode:
    """A node to sample at: the sampler, the text position, and the draft tokens before it."""

    chooser: TokenSampler
    position: int
    path: tuple[int, ...] = ()
    """Draft tokens from the root's child to this node, not yet observed by the chooser."""


class SampledToken(NamedTuple):
    token: int
    logprob: Logprob | None


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`; the first is the request's own."""
    if index == 0:
        return seed
    mixed = splitmix64(splitmix64(seed % 2**64) ^ index)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def choose(logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels) -> list[SampledToken]:
    """Sample a token at each node; logits are not modified."""
    tokens: list[int] = _chosen(logits_NV, nodes, kernels).tolist()
    logprobs = _logprobs(logits_NV, nodes, tokens)
    return [SampledToken(token, logprobs.get(n)) for n, token in enumerate(tokens)]


def _chosen(logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels) -> Tensor:
    """Return the token of each node, or NO_TOKEN.

    Nodes that depend only on logits and position use the same kernel as device steps: its noise and sums may
    round differently from the separate operations. Raw logits are compared identically.
    """
    if all(node.chooser.is_greedy_plain for node in nodes):
        return best_of(logits_NV)
    parts: dict[bool, list[int]] = {}
    for n, node in enumerate(nodes):
        parts.setdefault(node.chooser.ignores_history, []).append(n)
    if len(parts) == 1:
        if not nodes[0].chooser.ignores_history:
            return best_of(perturb(logits_NV, nodes, kernels))
        picked_N: Tensor = kernels.sample(logits_NV, *places(logits_NV.device, nodes))
        return picked_N
    token_N = torch.empty(len(nodes), dtype=torch.int64, device=logits_NV.device)
    for part in parts.values():
        row_R = torch.tensor(part, device=logits_NV.device)
        token_N[row_R] = _chosen(logits_NV[row_R], [nodes[n] for n in part], kernels)
    return token_N


def places(device: torch.device, nodes: Sequence[SamplingNode]) -> tuple[Rules, Tensor, Tensor]:
    """Return the nodes' rules, seeds and positions."""
    seed_N = torch.tensor([node.chooser.seed for node in nodes], device=device)
    return _rules(nodes, device), seed_N, torch.tensor([node.position for node in nodes], device=device)


def perturb(
    logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels, *, noise: bool = True
) -> Tensor:
    """Return each node's scores: processed logits plus the noise of its position.

    Returns the argument itself if no node has rules. Without `noise` the scores are those of plain ranking.
    """
    busy = [n for n, node in enumerate(nodes) if not node.chooser.is_greedy_plain]
    if not busy:
        return logits_NV
    if len(busy) == len(nodes):
        return _scores(logits_NV, nodes, kernels, noise=noise)
    scores_NV, busy_R = logits_NV.clone(), torch.tensor(busy, device=logits_NV.device)
    scores_NV[busy_R] = _scores(logits_NV[busy_R], [nodes[n] for n in busy], kernels, noise=noise)
    return scores_NV


def _scores(logits_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels, *, noise: bool) -> Tensor:
    scores_NV = kernels.process(logits_NV, _rules(nodes, logits_NV.device))
    if noise:
        _add_noise(scores_NV, nodes, kernels)
    return scores_NV


def _add_noise(scores_NV: Tensor, nodes: Sequence[SamplingNode], kernels: Kernels) -> None:
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
        scores_NV.index_add_(0, torch.tensor(sampled, device=device), noise_RV.to(scores_NV.dtype))


def _rules(nodes: Sequence[SamplingNode], device: torch.device) -> Rules:
    """Gather the nodes' parameters; a rule that none uses stays None."""
    temperatures, *filters = zip(*(node.chooser.rule for node in nodes), strict=True)
    columns = (
        make_column(values, device) if any(value != off for value in values) else None
        for values, off in zip(filters, RowRule()[1:], strict=True)
    )
    return Rules.of(
        (make_column(temperatures, device), *columns),
        bias=_bias(nodes, device),
        penalties=_penalties(nodes, device),
        mask=_mask(nodes, device),
    )


def _bias(nodes: Sequence[SamplingNode], device: torch.device) -> Bias | None:
    kept = [(n, node.chooser.bias) for n, node in enumerate(nodes) if node.chooser.bias]
    return Bias(*_columns(kept, device)) if kept else None


def _penalties(nodes: Sequence[SamplingNode], device: torch.device) -> Penalties | None:
    """Return token counts of each penalised node: its request's tokens and its own path."""
    kept = [
        (n, history.along(node.path)) for n, node in enumerate(nodes) if (history := node.chooser.history)
    ]
    if not kept:
        return None
    params = [nodes[n].chooser.params for n, _ in kept]
    return Penalties(
        *_columns(kept, device),
        _floats([p.repetition_penalty for p in params], device),
        _floats([p.presence_penalty for p in params], device),
        _floats([p.frequency_penalty for p in params], device),
    )


def _floats(values: Sequence[float], device: torch.device) -> Tensor:
    """Return a float32 column, independent of torch's default type."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _columns(
    kept: Sequence[tuple[int, tuple["array[int]", "array[float]"]]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Concatenate tokens and values of some rows; return row indices, lengths, tokens and values."""
    rows, columns = zip(*kept, strict=True)
    tokens, values = zip(*columns, strict=True)
    length_R = torch.tensor([len(column) for column in tokens], device=device)
    return torch.tensor(rows, device=device), length_R, _joined(tokens, device), _joined(values, device)


def _joined(columns: Sequence["array[Any]"], device: torch.device) -> Tensor:
    """Concatenate int32 or float32 columns."""
    dtype = torch.int32 if columns[0].typecode == "i" else torch.float32
    data = bytearray().join(columns)
    return (
        torch.frombuffer(data, dtype=dtype).to(device) if data else torch.empty(0, dtype=dtype, device=device)
    )


def ask(nodes: Iterable[SamplingNode]) -> list[TokenSampler]:
    """Request masks at some nodes, and return their choosers."""
    paths: dict[TokenSampler, list[tuple[int, ...]]] = {}
    for node in nodes:
        if node.chooser.limits:
            paths.setdefault(node.chooser, []).append(node.path)
    for chooser, node_paths in paths.items():
        for limit in chooser.limits:
            limit.ask(node_paths)
    return list(paths)


def wait_for_masks(nodes: Iterable[SamplingNode], *, always: bool = False) -> None:
    """Wait up to `WAIT_S` for the masks at some nodes; late ones stay unknown."""
    choosers = ask(nodes)
    until_s = time.monotonic() + WAIT_S
    for chooser in choosers:
        for limit in chooser.limits:
            limit.wait(until_s, always=always)


def _mask(nodes: Sequence[SamplingNode], device: torch.device) -> Mask | None:
    """Gather the masks. An unknown mask allows everything, and its choice must be discarded."""
    wait_for_masks(nodes)
    bounded = [(n, bounded_words(node.chooser.limits, node.path)) for n, node in enumerate(nodes)]
    kept = [(n, words_W) for n, words_W in bounded if words_W is not None]
    if not kept:
        return None
    rows, words = zip(*kept, strict=True)
    # Nodes with identical masks share their memory.
    masks = {words_W.data_ptr(): words_W for words_W in words}
    order = {pointer: k for k, pointer in enumerate(masks)}
    sets = [order[words_W.data_ptr()] for words_W in words]
    return Mask(
        torch.tensor(rows, device=device),
        torch.tensor(sets, device=device),
        torch.stack(list(masks.values())).to(device),
    )


def _logprobs(logits_NV: Tensor, nodes: Sequence[SamplingNode], tokens: Sequence[int]) -> dict[int, Logprob]:
    """Return the log-probabilities of nodes that request them and have a token."""
    wanted = {
        n: count
        for n, node in enumerate(nodes)
        if (count := node.chooser.params.logprobs) is not None and tokens[n] != NO_TOKEN
    }
    if not wanted:
        return {}
    if len(wanted) < len(nodes):
        logits_NV = logits_NV[torch.tensor(list(wanted), device=logits_NV.device)]
    logprobs = logprobs_of(logits_NV, [tokens[n] for n in wanted], list(wanted.values()))
    return dict(zip(wanted, logprobs, strict=True))


def logprob_of(logits_V: Tensor, token: int, wanted: int) -> Logprob:
    """Return one row's log-probabilities; ties are ordered by token id."""
    return logprobs_of(logits_V[None], [token], [wanted])[0]
