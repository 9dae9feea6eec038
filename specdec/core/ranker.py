"""Rank a head's guesses by the rule by which their request will choose."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.draft.drafter import Want
from specdec.draft.levels import Place
from specdec.kernels.sampling.rules import Rules
from specdec.kernels.table import Kernels
from specdec.verify.choose import Chooser, Node, places
from specdec.verify.rank import Ranked, rank


class Ranker:
    """Ranks by a request's own rule and, with `noise`, by the noise with which the target will choose."""

    def __init__(self, kernels: Kernels, *, noise: bool) -> None:
        self.kernels, self.noise = kernels, noise

    def rank(self, logits_NV: Tensor, at: Sequence[Place], count: int) -> list[Ranked]:
        """Return the best tokens of each place, and how sure the head is of each."""
        nodes = [_node(place.want, place.path) for place in at]
        return rank(logits_NV, nodes, self.kernels, count, noise=self.noise)

    def goes_straight(self, want: Want) -> bool:
        """Return whether a chain's guesses for a request can be ranked before it is known what they are.

        Without the noise a guess's share is a probability by the request's whole rule, as it is in trees.
        """
        chooser = _node(want).chooser
        return chooser.ignores_history and (self.noise or chooser.is_greedy_plain)

    def rules(self, wants: Sequence[Want], device: torch.device) -> tuple[Rules, Tensor]:
        """Return the rules of requests whose guesses can be ranked so, and their seeds."""
        rules, seed_N, _ = places(device, [_node(want) for want in wants])
        return rules, seed_N


def _node(want: Want, path: tuple[int, ...] = ()) -> Node:
    assert isinstance(want.sampler, Chooser)
    return Node(want.sampler, len(want.tokens) + len(path), path)
