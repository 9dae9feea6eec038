"""The token tree: the one structure that drafting, verifying and the kernels share."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Tokens in topological order: node 0 is the root, the last token that is certain.

    `parents[0]` is -1: the root hangs on what the row has committed.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert self.parents[0] == -1 and min(self.parents[1:], default=0) >= 0
        assert all(map(lt, self.parents, range(len(self)))), "a parent comes first"

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "TokenTree":
        """Make a tree in which each token follows the one before it."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def ancestor_masks(self) -> tuple[int, ...]:
        """Bit j of entry i is set when node j is an ancestor of i, or i itself."""
        masks: list[int] = []
        for i, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
        return tuple(masks)

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes that a text passes from the root on, both included, as far as drafted."""
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

    def taps(self, width: int) -> tuple[tuple[int, ...], ...]:
        """Return, per node, where a convolution of `width` finds its inputs, oldest first.

        Indices count the width-1 inputs before the window and then the window's own, so that a path which
        leaves the tree at its root goes on into what came before.
        """
        before = width - 1
        taps: list[tuple[int, ...]] = []
        for i, parent in enumerate(self.parents):
            above = taps[parent][1:] if parent >= 0 else tuple(range(before))
            taps.append((*above, before + i))
        return tuple(taps)
