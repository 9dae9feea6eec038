"""Rank a head's guesses by their request's sampling rule."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.draft.drafter import DraftRequest
from specdec.draft.levels import DraftPosition
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.table import Kernels
from specdec.verify.rank import Ranked, rank
from specdec.verify.sampler import SamplingNode, TokenSampler, places


class Ranker:
    """Ranks guesses by a request's rule and, with `noise`, by the noise the target will sample with."""

    def __init__(self, kernels: Kernels, *, noise: bool) -> None:
        self.kernels, self.noise = kernels, noise

    def rank(self, logits_NV: Tensor, at: Sequence[DraftPosition], count: int) -> list[Ranked]:
        """Return the best tokens of each position, and their probabilities."""
        nodes = [_node(position.want, position.path) for position in at]
        return rank(logits_NV, nodes, self.kernels, count, noise=self.noise)

    def goes_straight(self, request: DraftRequest) -> bool:
        """Return whether a request's chains can be drafted in one pass, independent of earlier guesses.

        Without noise, a guess's probability must follow the request's whole rule, as in trees.
        """
        chooser = _node(request).chooser
        return chooser.ignores_history and (self.noise or chooser.is_greedy_plain)

    def rules(self, requests: Sequence[DraftRequest], device: torch.device) -> tuple[Rules, Tensor]:
        """Return the sampling rules of requests that `goes_straight`, and their seeds."""
        rules, seed_N, _ = places(device, [_node(request) for request in requests])
        return rules, seed_N


def _node(request: DraftRequest, path: tuple[int, ...] = ()) -> SamplingNode:
    assert isinstance(request.sampler, TokenSampler)
    return SamplingNode(request.sampler, len(request.tokens) + len(path), path)
