"""Walk down a tree along the tokens that the target chose."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kernels.tree import row
from specdec.state_slots.tree import TokenTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    nodes: tuple[int, ...]
    """The nodes that the request keeps, the root first."""
    emitted: tuple[int, ...]
    """The tokens it gains: those of the nodes below the root, and the one chosen at the last of them."""


def walk(chosen: Sequence[int], tree: TokenTree) -> AcceptedPath:
    """Follow the chosen token to the child that drafted it, from the root on, until no child did."""
    nodes = row.walk(chosen, tree.tokens, tree.parents)
    return AcceptedPath(tuple(nodes), tuple(chosen[node] for node in nodes))
