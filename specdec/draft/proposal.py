"""A drafter's result: a token tree with each node's probability of being accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le

from specdec.kernels.tree.row import by_score, renumber
from specdec.state_slots.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftShape:
    num_steps: int
    """Depth of the draft."""
    topk: int
    """Maximum children per node; 1 drafts a chain."""
    num_draft_tokens: int
    """Number of tokens verified in a step, the root included."""

    def __post_init__(self) -> None:
        assert self.num_steps >= 1 and self.topk >= 1 and self.num_draft_tokens >= 1

    def within(self, num_draft_tokens: int) -> "DraftShape | None":
        """Return the shape cut to this many nodes; None if no draft is left."""
        if num_draft_tokens < 2:
            return None
        return DraftShape(min(self.num_steps, num_draft_tokens - 1), self.topk, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft tree, including its root: the last committed token, whose score is 1."""

    tree: TokenTree
    scores: tuple[float, ...]
    """Estimated probability that a node lies on the accepted path, at most its parent's."""
    beliefs: tuple[float, ...] = ()
    """Each node's probability given its parent, before calibration; empty: unknown."""
    shared: tuple[bool, ...] = ()
    """Whether each node was found only in outputs of finished requests; empty: none was."""

    def __post_init__(self) -> None:
        count, parents = len(self.tree), self.tree.parents
        assert len(self.scores) == count and self.scores[0] == 1
        assert len(self.beliefs) in (0, count) and len(self.shared) in (0, count)
        above = [self.scores[parent] for parent in parents[1:]]
        falls = all(map(le, self.scores[1:], above)) and min(self.scores) >= 0
        assert falls, "a score is the probability of the whole path: at most its parent's"
        assert len(set(zip(parents, self.tree.tokens, strict=True))) == count, "siblings differ"

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int], scores: Sequence[float]) -> "Proposal":
        """Build a chain below the root."""
        return cls(TokenTree.chain((root, *tokens)), (1.0, *scores))

    @classmethod
    def bare(cls, root: int) -> "Proposal":
        """Return a proposal with the root only."""
        return cls(TokenTree.chain((root,)), (1.0,))

    @property
    def num_drafted(self) -> int:
        """Number of nodes below the root."""
        return len(self.tree) - 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings by score; ties go to the earlier node."""
        parents = self.tree.parents
        ranks, seen = [0] * len(parents), dict[int, int]()
        for node in by_score(self.scores):
            ranks[node] = seen.get(parents[node], 0)
            seen[parents[node]] = ranks[node] + 1
        return tuple(ranks)

    def best(self, limit: int) -> "Proposal":
        """Return the `limit` best nodes by score, the root included, in their order; ties go to the earlier.

        A parent precedes its children and scores no less, so it is always selected with them.
        """
        return self._take(sorted(by_score(self.scores)[: max(limit, 1)]))

    def above(self, depth: int) -> "Proposal":
        """Return the nodes down to a depth."""
        return self._take([node for node, d in enumerate(self.tree.depths) if d <= depth])

    def _take(self, kept: Sequence[int]) -> "Proposal":
        """Return these nodes, whose parents must be among them."""
        count, (tokens, parents) = len(kept), (self.tree.tokens, self.tree.parents)
        if count == len(parents):
            return self
        if kept[-1] == count - 1:  # a prefix, as in every chain
            tree = TokenTree(tokens[:count], parents[:count])
            return Proposal(tree, self.scores[:count], self.beliefs[:count], self.shared[:count])
        return Proposal(
            TokenTree(tuple(tokens[node] for node in kept), tuple(renumber(parents, kept))),
            scores=tuple(self.scores[node] for node in kept),
            beliefs=tuple(self.beliefs[node] for node in kept) if self.beliefs else (),
            shared=tuple(self.shared[node] for node in kept) if self.shared else (),
        )


def merge(root: int, proposals: Sequence[Proposal], limit: int | None = None) -> Proposal:
    """Merge proposals with one root and return the `limit` best nodes, the root included.

    Nodes with equal paths become one, with the highest of their scores. Unless there is a single proposal,
    `beliefs` and `shared` are dropped: each drafter is calibrated on its own proposal.
    """
    if len(proposals) == 1:
        return proposals[0] if limit is None else proposals[0].best(limit)
    tokens, parents, scores = [root], [-1], [1.0]
    nodes: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        index = [0]
        edges = zip(proposal.tree.tokens[1:], proposal.tree.parents[1:], proposal.scores[1:], strict=True)
        for token, parent, score in edges:
            node = nodes.setdefault((index[parent], token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(index[parent])
                scores.append(score)
            index.append(node)
            scores[node] = max(scores[node], score)
    merged = Proposal(TokenTree(tuple(tokens), tuple(parents)), tuple(scores))
    return merged if limit is None else merged.best(limit)
