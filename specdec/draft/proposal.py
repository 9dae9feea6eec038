"""What a drafter returns: a token tree whose nodes have a probability of being accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le

from specdec.kernels.tree.row import by_score, renumber
from specdec.state_slots.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Shape:
    num_steps: int
    """How deep to draft."""
    topk: int
    """How many children a node may get; 1 drafts a chain."""
    num_draft_tokens: int
    """How many tokens are verified in a step, the root included."""

    def __post_init__(self) -> None:
        assert self.num_steps >= 1 and self.topk >= 1 and self.num_draft_tokens >= 1

    def within(self, num_draft_tokens: int) -> "Shape | None":
        """Return the same with this many nodes; None where no draft is left."""
        if num_draft_tokens < 2:
            return None
        return Shape(min(self.num_steps, num_draft_tokens - 1), self.topk, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted tree, its root included: the last token that is certain, whose score is 1."""

    tree: TokenTree
    scores: tuple[float, ...]
    """The estimated probability that a node lies on the accepted path: never above its parent's."""
    beliefs: tuple[float, ...] = ()
    """Each node's probability given its parent, as its drafter had it before calibration; empty: unknown."""
    shared: tuple[bool, ...] = ()
    """Whether each node was found in the outputs of finished requests alone; empty: no node was."""

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
        """Make a proposal in which each token follows the one before it, the first one the root."""
        return cls(TokenTree.chain((root, *tokens)), (1.0, *scores))

    @classmethod
    def bare(cls, root: int) -> "Proposal":
        """Propose nothing below the root."""
        return cls(TokenTree.chain((root,)), (1.0,))

    @property
    def num_drafted(self) -> int:
        """Count the nodes below the root."""
        return len(self.tree) - 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among its siblings by score; of equals the earlier is first."""
        parents = self.tree.parents
        ranks, seen = [0] * len(parents), dict[int, int]()
        for node in by_score(self.scores):
            ranks[node] = seen.get(parents[node], 0)
            seen[parents[node]] = ranks[node] + 1
        return tuple(ranks)

    def best(self, limit: int) -> "Proposal":
        """Keep the `limit` best nodes by score, the root included, in their order; of equals the earlier.

        A parent comes before its children and scores no less, so that it is kept wherever they are.
        """
        return self._take(sorted(by_score(self.scores)[: max(limit, 1)]))

    def above(self, depth: int) -> "Proposal":
        """Keep the nodes down to a depth."""
        return self._take([node for node, own in enumerate(self.tree.depths) if own <= depth])

    def _take(self, kept: Sequence[int]) -> "Proposal":
        """Keep nodes whose parents are kept."""
        count, (tokens, parents) = len(kept), (self.tree.tokens, self.tree.parents)
        if count == len(parents):
            return self
        if kept[-1] == count - 1:  # as in every chain: its beginning
            tree = TokenTree(tokens[:count], parents[:count])
            return Proposal(tree, self.scores[:count], self.beliefs[:count], self.shared[:count])
        return Proposal(
            TokenTree(tuple(tokens[node] for node in kept), tuple(renumber(parents, kept))),
            scores=tuple(self.scores[node] for node in kept),
            beliefs=tuple(self.beliefs[node] for node in kept) if self.beliefs else (),
            shared=tuple(self.shared[node] for node in kept) if self.shared else (),
        )


def merge(root: int, proposals: Sequence[Proposal], limit: int | None = None) -> Proposal:
    """Make one tree of several below a root and keep its `limit` best nodes, the root included.

    Nodes with one path become one, which scores the highest of theirs. Unless there is a single proposal,
    beliefs and `shared` are left out: they are the drafters', each of which learns from its own proposal.
    """
    if len(proposals) == 1:
        return proposals[0] if limit is None else proposals[0].best(limit)
    tokens, parents, scores = [root], [-1], [1.0]
    nodes: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        place = [0]
        edges = zip(proposal.tree.tokens[1:], proposal.tree.parents[1:], proposal.scores[1:], strict=True)
        for token, parent, score in edges:
            node = nodes.setdefault((place[parent], token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(place[parent])
                scores.append(score)
            place.append(node)
            scores[node] = max(scores[node], score)
    merged = Proposal(TokenTree(tuple(tokens), tuple(parents)), tuple(scores))
    return merged if limit is None else merged.best(limit)
