"""Rank a head's guesses by their request's sampling rule."""

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
    """Ranks guesses by a request's rule and, with `noise`, by the noise the target will sample with."""

    def __init__(self, kernels: Kernels, *, noise: bool) -> None:
        self.kernels, self.noise = kernels, noise

    def rank(self, logits_NV: Tensor, at: Sequence[Place], count: int) -> list[Ranked]:
        """Return the best tokens of each position, and their probabilities."""
        nodes = [_node(place.want, place.path) for place in at]
        return rank(logits_NV, nodes, self.kernels, count, noise=self.noise)

    def goes_straight(self, want: Want) -> bool:
        """Return whether a request's chains can be drafted in one pass, independent of earlier guesses.

        Without noise, a guess's probability must follow the request's whole rule, as in trees.
        """
        chooser = _node(want).chooser
        return chooser.ignores_history and (self.noise or chooser.is_greedy_plain)

    def rules(self, wants: Sequence[Want], device: torch.device) -> tuple[Rules, Tensor]:
        """Return the sampling rules of requests that `goes_straight`, and their seeds."""
        rules, seed_N, _ = places(device, [_node(want) for want in wants])
        return rules, seed_N


def _node(want: Want, path: tuple[int, ...] = ()) -> Node:
    assert isinstance(want.sampler, Chooser)
    return Node(want.sampler, len(want.tokens) + len(path), path)
