"""Calibrate drafter probabilities with the acceptance of earlier proposals."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat

from specdec.draft.proposal import Proposal
from specdec.kernels.tree.row import siblings

LOWEST, HIGHEST = 0.001, 0.999
"""Bounds of a calibrated probability."""


@dataclass(slots=True)
class AcceptanceTally:
    """Acceptance of the nodes of one depth and rank, with exponential decay."""

    seen: float = 0.0
    believed: float = 0.0
    accepted: float = 0.0

    def add(self, belief: float, accepted: bool, fade: float) -> None:
        self.seen = self.seen * fade + 1
        self.believed = self.believed * fade + belief
        self.accepted = self.accepted * fade + accepted

    def ratio(self, prior: float) -> float:
        """Return observed over believed acceptance, shrunk towards 1 by `prior` virtual observations."""
        if not self.believed:
            return 1.0
        return (self.seen * self.accepted / self.believed + prior) / (self.seen + prior)


class Calibrator:
    """Acceptance rate and mean drafter probability by depth and rank, conditional on an accepted parent.

    A belief times the ratio of the two is a probability that can be compared across depths, ranks and
    drafters. Each drafter has its own; only `observe`, `forget` and `recall` change it.
    """

    def __init__(
        self, *, max_depth: int = 8, max_rank: int = 8, prior: float = 24.0, memory: float = 1000.0
    ) -> None:
        assert prior > 0 and memory > 1
        self.prior = prior
        self.fade = 1 - 1 / memory
        self.tallies = [[AcceptanceTally() for _ in range(max_rank)] for _ in range(max_depth)]
        """By depth, from 1, and rank, from 0; the last entry of each also serves everything beyond."""

    def forget(self) -> None:
        """Reset all tallies."""
        self.tallies = [[AcceptanceTally() for _ in row] for row in self.tallies]

    def recall(self, tallies: Sequence[Sequence[AcceptanceTally]]) -> None:
        """Replace the tallies by a copy of these."""
        self.tallies = [[replace(tally) for tally in row] for row in tallies]

    def siblings(self, beliefs: Sequence[float], depth: int) -> list[float]:
        """Return calibrated probabilities of one node's children, given by descending belief.

        The order is preserved, so the rank under which a node is observed is the rank under which it was
        calibrated.
        """
        gains = (self._tally(depth, rank).ratio(self.prior) for rank in count())
        return siblings(beliefs, gains, repeat(LOWEST), repeat(HIGHEST))

    def table(self) -> list[list[list[float]]]:
        """Return, by depth and rank, the factor of a belief and the bounds of the product.

        The last depth and rank also serve all beyond. With this table a device computes what `siblings` does.
        """
        ratios = [[tally.ratio(self.prior) for tally in row] for row in self.tallies]
        return [ratios, *([[bound] * len(row) for row in ratios] for bound in (LOWEST, HIGHEST))]

    def observe(self, proposal: Proposal, accepted_nodes: Collection[int]) -> None:
        """Update from one verified proposal; `accepted_nodes` are those on the accepted path.

        Nodes whose parent was rejected are skipped: their condition never occurred.
        """
        reached = {0, *accepted_nodes}
        depths, ranks, parents = proposal.tree.depths, proposal.ranks, proposal.tree.parents
        for node in range(1, len(parents)):
            if parents[node] in reached:
                self._tally(depths[node], ranks[node]).add(
                    _belief(proposal, node), node in reached, self.fade
                )

    def _tally(self, depth: int, rank: int) -> AcceptanceTally:
        row = self.tallies[min(depth, len(self.tallies)) - 1]
        return row[min(rank, len(row) - 1)]


class AssumedRates(Calibrator):
    """Fixed rates for tests and benchmarks: the likeliest child gets its depth's rate, siblings 0."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = rates

    def siblings(self, beliefs: Sequence[float], depth: int) -> list[float]:
        """Return the rate of this depth, then zeros."""
        rate = self.rates[depth - 1] if depth <= len(self.rates) else 0.0
        return [rate, *[0.0] * (len(beliefs) - 1)][: len(beliefs)]

    def table(self) -> list[list[list[float]]]:
        """Return a table in which both bounds are the rate, so the belief has no effect."""
        chances = [[rate, 0.0] for rate in (*self.rates, 0.0)]
        return [[[0.0, 0.0] for _ in chances], chances, chances]


def _belief(proposal: Proposal, node: int) -> float:
    """Return the drafter's probability of a node, or the one implied by the scores."""
    if proposal.beliefs:
        return proposal.beliefs[node]
    above = proposal.scores[proposal.tree.parents[node]]
    return proposal.scores[node] / above if above else 0.0
