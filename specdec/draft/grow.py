"""Grow a draft tree level by level, as EAGLE-2 does, from a model's probabilities."""

from collections.abc import Sequence
from itertools import pairwise

from specdec.draft.calibration import Calibrator
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree


class Grower:
    """The draft tree of one row while it grows.

    While `frontier` is not empty, call `add` with the children of each of its nodes, starting with the root.
    After the last one, the `topk` nodes of the new level with the best cumulative scores become the frontier.
    `finish` returns the best nodes of all levels; it may be called at any level.

    With a calibrator, cumulative scores are products of calibrated probabilities.
    """

    def __init__(self, root: int, shape: DraftShape, calibrator: Calibrator | None = None) -> None:
        self.shape = shape
        self.calibrator = calibrator
        self.tokens, self.parents = [root], [-1]
        self.scores, self.beliefs = [1.0], [1.0]
        self.depth = 0
        """Number of complete levels: the frontier's depth."""
        self.frontier: list[int] = [0]
        """Nodes to expand next; replaced, never mutated. Empty once the requested depth is reached."""
        self._waiting = {0}
        self._level_start = 1

    def add(self, node: int, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Add the children of a frontier node, likeliest first; those beyond `topk` are dropped.

        Probabilities are conditional on the node. Rounding may lift one a little above 1.
        """
        topk = self.shape.topk
        beliefs = [min(float(p), 1.0) for p in probabilities[:topk]]
        assert len(tokens) == len(probabilities) and all(0 <= p <= 1.001 for p in probabilities[:topk])
        assert all(first >= second for first, second in pairwise(beliefs))
        self._waiting.remove(node)
        above = self.scores[node]
        chances = self.calibrator.siblings(beliefs, self.depth + 1) if self.calibrator else beliefs
        for token, chance, belief in zip(tokens[:topk], chances, beliefs, strict=True):
            self.tokens.append(int(token))
            self.parents.append(node)
            self.scores.append(above * chance)
            self.beliefs.append(belief)
        if not self._waiting:
            self._next_level()

    def _next_level(self) -> None:
        level = range(self._level_start, len(self.tokens))
        self._level_start = len(self.tokens)
        self.depth += 1
        deeper = self.depth < self.shape.num_steps
        best = sorted(level, key=lambda node: -self.scores[node])[: self.shape.topk]
        self.frontier = best if deeper else []
        self._waiting = set(self.frontier)

    def finish(self) -> Proposal:
        """Return the `num_draft_tokens` best nodes."""
        tree = TokenTree(tuple(self.tokens), tuple(self.parents))
        grown = Proposal(tree, tuple(self.scores), tuple(self.beliefs))
        return grown.best(self.shape.num_draft_tokens)
