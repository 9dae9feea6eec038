"""Choose one token at each node: the argmax of processed logits plus the noise of (seed, position, token).

Nothing of a batch, a slot or a step enters, so a node's choice is what plain sampling with its seed gives.
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
from specdec.verify.history import History
from specdec.verify.limits import Limit, bounded_words
from specdec.verify.logprobs import Logprob, logprobs_of

WAIT_S = 0.005
"""For what limits allow, each time that some of a step's choices need it."""
HOTTEST = 1e30
"""Beyond it float32 knows no temperature; all tokens are equally likely long before."""


def row_rule(params: SamplingParams) -> RowRule:
    """Bound a request's numbers to what tensors and kernels take: the one place where they are read."""
    # No vocabulary comes near the bound of top_k, which keeps a number of any size within its type.
    return RowRule(
        temperature=min(float(params.temperature), HOTTEST),
        top_k=min(max(params.top_k, 0), 2**31),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
    )


class BiasColumns(NamedTuple):
    """What a request adds to its logits, as columns of int32 and float32 that steps join."""

    tokens: "array[int]"
    values: "array[float]"

    @classmethod
    def of(cls, params: SamplingParams) -> Self | None:
        """Return them; None where nothing is added."""
        bias = params.logit_bias
        return cls(array("i", bias), array("f", bias.values())) if bias else None


class Chooser:
    """One request's rule of choice. Only `observe` changes it: penalties and limits hang on what was said."""

    __slots__ = ("bias", "history", "limits", "params", "rule", "seed")

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        vocab: int,
        limits: Sequence[Limit] = (),
    ) -> None:
        self.params, self.rule, self.seed, self.limits = params, row_rule(params), seed, limits
        self.bias = BiasColumns.of(params)
        is_penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self.history = History(prompt) if is_penalised else None

    @property
    def ignores_history(self) -> bool:
        """Whether what it compares hangs on the logits and the place alone."""
        return self.bias is None and self.history is None and not self.limits

    @property
    def is_greedy_plain(self) -> bool:
        """Whether it compares the logits as they are."""
        return self.params.temperature == 0 and self.ignores_history

    @property
    def runs_on_device(self) -> bool:
        """Whether besides that only a token is asked for."""
        return self.ignores_history and self.params.logprobs is None

    def observe(self, token: int) -> None:
        """Count a token that the request has accepted."""
        if self.history:
            self.history.observe(token)
        if self.limits:
            self.limits = [limit for limit in self.limits if limit.observe(token)]

    @property
    def is_over(self) -> bool:
        """Whether a limit lets nothing follow, as far as that is known."""
        return bool(self.limits) and any(limit.is_over for limit in self.limits)

    @property
    def fault(self) -> tuple[str, str] | None:
        """Where a limit leaves nothing to choose and the output may not end: the field, and why."""
        if not self.limits:
            return None
        return next(((own.field, own.fault) for own in self.limits if own.fault), None)

    @property
    def is_slow(self) -> bool:
        """Whether a limit was late of late, so that a draft would be too."""
        return bool(self.limits) and any(limit.is_slow for limit in self.limits)

    def knows(self, path: tuple[int, ...] = ()) -> bool:
        """Return whether a token can be chosen behind a path: what limits allow there is known."""
        return not self.limits or all(limit.knows(path) for limit in self.limits)


@dataclass(frozen=True, slots=True)
class Node:
    """A place where a token is to be chosen: for whom, where in the text, after which drafted tokens."""

    chooser: Chooser
    position: int
    path: tuple[int, ...] = ()
    """The drafted tokens from the root's child to this node, which the chooser has not observed."""


class Choice(NamedTuple):
    token: int
    logprob: Logprob | None


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one of several choices; the first is the request's own."""
    if index == 0:
        return seed
    mixed = splitmix64(splitmix64(seed % 2**64) ^ index)
    return mixed - 2**64 if mixed >= 2**63 else mixed


def choose(logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels) -> list[Choice]:
    """Choose a token at each node, given its logits, which stay as they are."""
    tokens: list[int] = _chosen(logits_NV, nodes, kernels).tolist()
    logprobs = _logprobs(logits_NV, nodes, tokens)
    return [Choice(token, logprobs.get(n)) for n, token in enumerate(tokens)]


def _chosen(logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels) -> Tensor:
    """Return the token of each node, or NO_TOKEN.

    Where nothing but logits and place count, the kernel picks that picks in steps on the device: its noise
    and its sums may round otherwise than those of the other operations. Bare logits are compared alike.
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


def places(device: torch.device, nodes: Sequence[Node]) -> tuple[Rules, Tensor, Tensor]:
    """Return the nodes' rules, seeds and positions."""
    seed_N = torch.tensor([node.chooser.seed for node in nodes], device=device)
    return _rules(nodes, device), seed_N, torch.tensor([node.position for node in nodes], device=device)


def perturb(logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels, *, noise: bool = True) -> Tensor:
    """Return what is compared at each node: its logits by its request's rules, plus the noise of its place.

    The argument itself where no node has rules. Without `noise` it is what plain ranking would compare.
    """
    busy = [n for n, node in enumerate(nodes) if not node.chooser.is_greedy_plain]
    if not busy:
        return logits_NV
    if len(busy) == len(nodes):
        return _scores(logits_NV, nodes, kernels, noise=noise)
    scores_NV, busy_R = logits_NV.clone(), torch.tensor(busy, device=logits_NV.device)
    scores_NV[busy_R] = _scores(logits_NV[busy_R], [nodes[n] for n in busy], kernels, noise=noise)
    return scores_NV


def _scores(logits_NV: Tensor, nodes: Sequence[Node], kernels: Kernels, *, noise: bool) -> Tensor:
    scores_NV = kernels.process(logits_NV, _rules(nodes, logits_NV.device))
    if noise:
        _add_noise(scores_NV, nodes, kernels)
    return scores_NV


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
        scores_NV.index_add_(0, torch.tensor(sampled, device=device), noise_RV.to(scores_NV.dtype))


def _rules(nodes: Sequence[Node], device: torch.device) -> Rules:
    """Gather the nodes' parameters; a part that none of them uses stays None."""
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


def _bias(nodes: Sequence[Node], device: torch.device) -> Bias | None:
    kept = [(n, node.chooser.bias) for n, node in enumerate(nodes) if node.chooser.bias]
    return Bias(*_columns(kept, device)) if kept else None


def _penalties(nodes: Sequence[Node], device: torch.device) -> Penalties | None:
    """Count what each penalised node has seen: its request's tokens and its own path's."""
    kept = [(n, own.along(node.path)) for n, node in enumerate(nodes) if (own := node.chooser.history)]
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
    """Make a column of numbers, whatever the process's default type is."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def _columns(
    kept: Sequence[tuple[int, tuple["array[int]", "array[float]"]]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join tokens and values of some rows; return the rows and each row's length before them."""
    rows, columns = zip(*kept, strict=True)
    tokens, values = zip(*columns, strict=True)
    length_R = torch.tensor([len(column) for column in tokens], device=device)
    return torch.tensor(rows, device=device), length_R, _joined(tokens, device), _joined(values, device)


def _joined(columns: Sequence["array[Any]"], device: torch.device) -> Tensor:
    """Join columns of int32, or of float32, into one."""
    dtype = torch.int32 if columns[0].typecode == "i" else torch.float32
    data = bytearray().join(columns)
    return (
        torch.frombuffer(data, dtype=dtype).to(device) if data else torch.empty(0, dtype=dtype, device=device)
    )


def ask(nodes: Iterable[Node]) -> list[Chooser]:
    """Start computing what limits allow at some nodes, and return whose they are."""
    paths: dict[Chooser, list[tuple[int, ...]]] = {}
    for node in nodes:
        if node.chooser.limits:
            paths.setdefault(node.chooser, []).append(node.path)
    for chooser, own in paths.items():
        for limit in chooser.limits:
            limit.ask(own)
    return list(paths)


def hear(nodes: Iterable[Node], *, always: bool = False) -> None:
    """Wait a little for what limits allow at some nodes, all together; what is late is not known then."""
    choosers = ask(nodes)
    until_s = time.monotonic() + WAIT_S
    for chooser in choosers:
        for limit in chooser.limits:
            limit.wait(until_s, always=always)


def _mask(nodes: Sequence[Node], device: torch.device) -> Mask | None:
    """Gather what limits allow. Where that is not known nothing is bound, and the choice not to be used."""
    hear(nodes)
    bounded = [(n, bounded_words(node.chooser.limits, node.path)) for n, node in enumerate(nodes)]
    kept = [(n, words_W) for n, words_W in bounded if words_W is not None]
    if not kept:
        return None
    rows, words = zip(*kept, strict=True)
    # Choices of one request share the memory of their words, where these are the same.
    places = {words_W.data_ptr(): words_W for words_W in words}
    order = {place: k for k, place in enumerate(places)}
    sets = [order[words_W.data_ptr()] for words_W in words]
    return Mask(
        torch.tensor(rows, device=device),
        torch.tensor(sets, device=device),
        torch.stack(list(places.values())).to(device),
    )


def _logprobs(logits_NV: Tensor, nodes: Sequence[Node], tokens: Sequence[int]) -> dict[int, Logprob]:
    """Return the log-probabilities of the nodes that ask for them and have a token."""
    wanted = {
        n: own
        for n, node in enumerate(nodes)
        if (own := node.chooser.params.logprobs) is not None and tokens[n] != NO_TOKEN
    }
    if not wanted:
        return {}
    if len(wanted) < len(nodes):
        logits_NV = logits_NV[torch.tensor(list(wanted), device=logits_NV.device)]
    found = logprobs_of(logits_NV, [tokens[n] for n in wanted], list(wanted.values()))
    return dict(zip(wanted, found, strict=True))


def logprob_of(logits_V: Tensor, token: int, wanted: int) -> Logprob:
    """Read one row's log-probabilities; of equally likely tokens the smaller id stands first."""
    return logprobs_of(logits_V[None], [token], [wanted])[0]
