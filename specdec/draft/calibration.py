"""Turn what a drafter believes into probabilities, from what was accepted of its earlier proposals."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat

from specdec.draft.proposal import Proposal
from specdec.kernels.tree.row import siblings

LOWEST, HIGHEST = 0.001, 0.999
"""No guess is hopeless, and none is certain."""


@dataclass(slots=True)
class Tally:
    """What came of the nodes of one depth and rank; older observations fade."""

    seen: float = 0.0
    believed: float = 0.0
    accepted: float = 0.0

    def add(self, belief: float, accepted: bool, fade: float) -> None:
        self.seen = self.seen * fade + 1
        self.believed = self.believed * fade + belief
        self.accepted = self.accepted * fade + accepted

    def ratio(self, prior: float) -> float:
        """Return observed over believed, drawn towards 1 as if `prior` observations had said so."""
        if not self.believed:
            return 1.0
        return (self.seen * self.accepted / self.believed + prior) / (self.seen + prior)


class Calibrator:
    """Keep, by depth and rank, how often a node was accepted once its parent was, and what was believed.

    A belief times the ratio of the two is a probability that can be compared across depths, ranks and
    drafters. One drafter owns it; `observe` is all that changes it.
    """

    def __init__(
        self, *, max_depth: int = 8, max_rank: int = 8, prior: float = 24.0, memory: float = 1000.0
    ) -> None:
        assert prior > 0 and memory > 1
        self.prior = prior
        self.fade = 1 - 1 / memory
        self.tallies = [[Tally() for _ in range(max_rank)] for _ in range(max_depth)]
        """By depth, from 1, and rank, from 0; the last of each stands for all beyond."""

    def forget(self) -> None:
        """Start anew."""
        self.tallies = [[Tally() for _ in row] for row in self.tallies]

    def recall(self, tallies: Sequence[Sequence[Tally]]) -> None:
        """Go on from a copy of what was observed once."""
        self.tallies = [[replace(tally) for tally in row] for row in tallies]

    def siblings(self, beliefs: Sequence[float], depth: int) -> list[float]:
        """Return the probabilities of one node's children, given by descending belief.

        Their order stays, so that the rank by score under which a node is observed is the rank under which
        it was calibrated.
        """
        gains = (self._tally(depth, rank).ratio(self.prior) for rank in count())
        return siblings(beliefs, gains, repeat(LOWEST), repeat(HIGHEST))

    def table(self) -> list[list[list[float]]]:
        """Return by depth and rank what a belief is multiplied by, and the bounds of the product.

        The last depth and the last rank stand for all beyond. With it, a device does what `siblings` does.
        """
        ratios = [[tally.ratio(self.prior) for tally in row] for row in self.tallies]
        return [ratios, *([[bound] * len(row) for row in ratios] for bound in (LOWEST, HIGHEST))]

    def observe(self, proposal: Proposal, accepted_nodes: Collection[int]) -> None:
        """Learn from one verified proposal; `accepted_nodes` are those on the accepted path.

        Nodes whose parent was rejected say nothing: what they were guessed to follow never came.
        """
        reached = {0, *accepted_nodes}
        depths, ranks, parents = proposal.tree.depths, proposal.ranks, proposal.tree.parents
        for node in range(1, len(parents)):
            if parents[node] in reached:
                self._tally(depths[node], ranks[node]).add(
                    _belief(proposal, node), node in reached, self.fade
                )

    def _tally(self, depth: int, rank: int) -> Tally:
        row = self.tallies[min(depth, len(self.tallies)) - 1]
        return row[min(rank, len(row) - 1)]


class Assumed(Calibrator):
    """Give the likeliest child the rate of its depth and the others nothing, whatever comes of them."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = rates

    def siblings(self, beliefs: Sequence[float], depth: int) -> list[float]:
        """Return the rate, then zeros."""
        rate = self.rates[depth - 1] if depth <= len(self.rates) else 0.0
        return [rate, *[0.0] * (len(beliefs) - 1)][: len(beliefs)]

    def table(self) -> list[list[list[float]]]:
        """Ignore the belief: both bounds are the rate."""
        chances = [[rate, 0.0] for rate in (*self.rates, 0.0)]
        return [[[0.0, 0.0] for _ in chances], chances, chances]


def _belief(proposal: Proposal, node: int) -> float:
    """Return what its drafter believed of a node; where it did not say, what the scores imply."""
    if proposal.beliefs:
        return proposal.beliefs[node]
    above = proposal.scores[proposal.tree.parents[node]]
    return proposal.scores[node] / above if above else 0.0
