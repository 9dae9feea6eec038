"""Grow a draft tree level by level, as EAGLE-2 does, from what a model says about each node."""

from collections.abc import Sequence
from itertools import pairwise

from specdec.draft.calibration import Calibrator
from specdec.draft.proposal import Proposal, Shape
from specdec.state_slots.tree import TokenTree


class Grower:
    """The draft tree of one row while a model grows it.

    While there is a `frontier`, the model says what may follow each of its nodes (`add`), at first the root.
    When the last of them has been expanded, the best `topk` nodes of the new level by cumulative score are
    the next frontier. `finish` keeps the best nodes of all levels; it may be called at any level.

    With a calibrator, cumulative scores are made of calibrated probabilities.
    """

    def __init__(self, root: int, shape: Shape, calibrator: Calibrator | None = None) -> None:
        self.shape = shape
        self.calibrator = calibrator
        self.tokens, self.parents = [root], [-1]
        self.scores, self.beliefs = [1.0], [1.0]
        self.depth = 0
        """How many levels are complete: the frontier's depth."""
        self.frontier: list[int] = [0]
        """The nodes to expand next; replaced, never changed in place. Empty: grown as deep as asked."""
        self._waiting = {0}
        self._level_start = 1

    def add(self, node: int, tokens: Sequence[int], probabilities: Sequence[float]) -> None:
        """Give a node of the frontier its children, likeliest first; those beyond `topk` are left out.

        Probabilities are given the node. Rounding may lift one a little above 1.
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
        """Return the best nodes, as many as are verified."""
        tree = TokenTree(tuple(self.tokens), tuple(self.parents))
        grown = Proposal(tree, tuple(self.scores), tuple(self.beliefs))
        return grown.best(self.shape.num_draft_tokens)
