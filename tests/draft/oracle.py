"""A drafter that knows the future texts, and makes some of its drafts wrong."""

from collections.abc import Sequence
from random import Random

from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest, StatelessDrafter
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.tree import TokenTree

DECAY = 0.9
"""A node's score relative to its parent's."""
SILENT = 0.15
"""Share of empty proposals, so that rows with and without drafts alternate."""


class Oracle(StatelessDrafter):
    """Propose a text's true continuation, each token right with probability `rate`; in a tree, among decoys.

    Proposals depend only on the sequence. The true token is anywhere among its siblings, and decoys have
    children, so that accepted paths wind through the tree.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, vocab: int, rate: float = 0.7) -> None:
        self.calibrator = Calibrator()
        self.texts, self.vocab, self.rate = [tuple(text) for text in texts], vocab, rate

    def propose(self, wants: Sequence[DraftRequest]) -> list[Proposal]:
        """Return a proposal for each sequence; unknown sequences get only decoys."""
        return [self._propose(w.tokens, w.shape) if w.shape else Proposal.bare(w.tokens[-1]) for w in wants]

    def _propose(self, said: Sequence[int], shape: DraftShape) -> Proposal:
        said = tuple(said)
        rng = Random(repr(said[-6:]) + str(len(said)))
        if rng.random() < SILENT:
            return Proposal.bare(said[-1])
        known = next((text for text in self.texts if text[: len(said)] == said), ())
        truth = known[len(said) : len(said) + shape.num_steps]
        tokens, parents, scores = [said[-1]], [-1], [1.0]
        level, spine = [0], 0
        for depth in range(shape.num_steps):
            right = truth[depth] if depth < len(truth) and rng.random() < self.rate else None
            below: list[int] = []
            on_spine = None
            for parent in level:
                if len(tokens) >= shape.num_draft_tokens:
                    break
                children = rng.sample(range(self.vocab), shape.topk if parent == spine else 1)
                if parent == spine and right is not None and right not in children:
                    children[rng.randrange(len(children))] = right
                for token in children[: shape.num_draft_tokens - len(tokens)]:
                    if parent == spine and token == right:
                        on_spine = len(tokens)
                    below.append(len(tokens))
                    scores.append(scores[parent] * DECAY)
                    tokens.append(token)
                    parents.append(parent)
            # After a wrong token the spine continues below the last node, which no text reaches.
            spine = on_spine if on_spine is not None else (below[-1] if below else spine)
            others = [node for node in below if node != spine][: shape.topk - 1]
            level = sorted([spine, *others]) if below else []
        return Proposal(TokenTree(tuple(tokens), tuple(parents)), tuple(scores))
