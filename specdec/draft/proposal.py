"""What a drafter hands over: a tree of guessed tokens, each with its chance of being accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le, lt
from typing import ClassVar

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
    """Drafted nodes in topological order; a parent of -1 is the root, which is no part of it.

    The root is the last token that is certain. Siblings differ in their tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    """The estimated probability that a node lies on the accepted path: never above its parent's."""
    beliefs: tuple[float, ...] = ()
    """Each node's probability given its parent, as its drafter had it before calibration; none: unknown."""
    shared: tuple[bool, ...] = ()
    """Whether each node was found in the outputs of finished requests alone; none: no node was."""

    EMPTY: ClassVar["Proposal"]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.scores)
        assert len(self.beliefs) in (0, len(self.tokens)) and len(self.shared) in (0, len(self.tokens))
        assert min(self.parents, default=-1) >= -1
        assert all(map(lt, self.parents, range(len(self)))), "a parent comes first"
        above = [self.scores[parent] if parent >= 0 else 1.0 for parent in self.parents]
        falls = all(map(le, self.scores, above)) and min(self.scores, default=0.0) >= 0
        assert falls, "a score is the probability of the whole path: at most its parent's"
        assert len(set(zip(self.parents, self.tokens, strict=True))) == len(self.tokens), "siblings differ"

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Sequence[float]) -> "Proposal":
        """Make a proposal in which each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(scores))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """How far below the root each node is; its children are at 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among its siblings by score; of equals the earlier is first."""
        ranks, seen = [0] * len(self), dict[int, int]()
        for node in self._by_score():
            ranks[node] = seen.get(self.parents[node], 0)
            seen[self.parents[node]] = ranks[node] + 1
        return tuple(ranks)

    def best(self, limit: int) -> "Proposal":
        """Keep the `limit` best nodes by score, in their order; of equals the earlier is better.

        A parent comes before its children and scores no less, so that it is kept wherever they are.
        """
        if limit <= 0:
            return Proposal.EMPTY
        return self._take(sorted(self._by_score()[:limit]))

    def above(self, depth: int) -> "Proposal":
        """Keep the nodes down to a depth."""
        return self._take([node for node, own in enumerate(self.depths) if own <= depth])

    def _take(self, kept: Sequence[int]) -> "Proposal":
        """Keep nodes whose parents are kept."""
        count = len(kept)
        if count == len(self):
            return self
        if kept and kept[-1] == count - 1:  # as in every chain: its beginning
            tokens, parents, scores = self.tokens[:count], self.parents[:count], self.scores[:count]
            return Proposal(tokens, parents, scores, self.beliefs[:count], self.shared[:count])
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        return Proposal(
            tokens=tuple(self.tokens[node] for node in kept),
            parents=tuple(place[self.parents[node]] for node in kept),
            scores=tuple(self.scores[node] for node in kept),
            beliefs=tuple(self.beliefs[node] for node in kept) if self.beliefs else (),
            shared=tuple(self.shared[node] for node in kept) if self.shared else (),
        )

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes that a text would pass, from the root's child on, until none has its token."""
        children = {edge: i for i, edge in enumerate(zip(self.parents, self.tokens, strict=True))}
        nodes: list[int] = []
        for token in tokens:
            node = children.get((nodes[-1] if nodes else -1, token))
            if node is None:
                break
            nodes.append(node)
        return tuple(nodes)

    def tree(self, root_token: int) -> TokenTree:
        """Hang the nodes on the root, which becomes node 0."""
        return TokenTree((root_token, *self.tokens), (-1, *(parent + 1 for parent in self.parents)))

    def _by_score(self) -> list[int]:
        return sorted(range(len(self)), key=lambda node: -self.scores[node])


Proposal.EMPTY = Proposal((), (), ())


def merge(proposals: Sequence[Proposal], limit: int) -> Proposal:
    """Make one tree of several and keep its `limit` best nodes.

    Nodes with one path become one, which scores the highest of theirs. Beliefs, and what is shared, are left
    out: they are the drafters', each of which is taught by its own proposal.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    nodes: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        place = {-1: -1}
        for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            edge = (place[parent], token)
            node = place[i] = nodes.setdefault(edge, len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(place[parent])
                scores.append(proposal.scores[i])
            scores[node] = max(scores[node], proposal.scores[i])
    return Proposal(tuple(tokens), tuple(parents), tuple(scores)).best(limit)
