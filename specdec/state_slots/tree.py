"""The token tree: the structure that drafting, verification and the kernels share."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt

from specdec.kernels.tree import row


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens in topological order: node 0 is the root, the last certain token.

    `parents[0]` is -1: the root follows the row's committed tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert self.parents[0] == -1 and min(self.parents[1:], default=0) >= 0
        assert all(map(lt, self.parents, range(len(self)))), "a parent comes first"

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "TokenTree":
        """Return a tree in which each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depths(self) -> list[int]:
        return row.depths(self.parents)

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the drafted nodes that a token sequence follows, starting with the root."""
        children = {edge: i for i, edge in enumerate(zip(self.parents, self.tokens, strict=True))}
        nodes = [0]
        for token in tokens:
            node = children.get((nodes[-1], token))
            if node is None:
                break
            nodes.append(node)
        return tuple(nodes)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to `node`, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))
