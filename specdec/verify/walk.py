"""Walk a draft tree along the tokens that the target sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.kernels.tree import row
from specdec.state_slots.tree import TokenTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    nodes: tuple[int, ...]
    """Accepted nodes, the root first."""
    emitted: tuple[int, ...]
    """Emitted tokens: the accepted nodes below the root, then the token sampled at the last node."""


def walk(chosen: Sequence[int], tree: TokenTree) -> AcceptedPath:
    """Follow the sampled token from the root to the child with that token, until there is none."""
    nodes = row.walk(chosen, tree.tokens, tree.parents)
    return AcceptedPath(tuple(nodes), tuple(chosen[node] for node in nodes))
