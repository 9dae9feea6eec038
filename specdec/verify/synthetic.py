"""Accept drafts at given rates instead of by their content: what speculation costs and earns, on any weights.

Only for benchmarks. The text is no longer the model's, and every output that comes of it says so.
"""

from collections.abc import Sequence

from specdec.kernels.sampling.reference import splitmix64
from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import AcceptedPath


def rates_for(length: float, num_steps: int) -> tuple[float, ...]:
    """Return the one rate at which drafts of `num_steps` have this mean acceptance length, bonus included."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        mean = sum(rate**depth for depth in range(num_steps + 1))
        low, high = (rate, high) if mean < length else (low, rate)
    return (high,) * num_steps


def synthetic_walk(
    chosen: Sequence[int], tree: TokenTree, rates: Sequence[float], *, seed: int, position: int
) -> AcceptedPath:
    """Go to a node's first child with the rate of that depth, drawn from seed and position; else stop.

    `position` is that of the token to be chosen at the root. The bonus token is still the target's choice.
    """
    children: dict[int, int] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, node)
    nodes, emitted = [0], []
    for depth, rate in enumerate(rates):
        child = children.get(nodes[-1])
        if child is None or splitmix64(splitmix64(seed % 2**64) ^ (position + depth)) >= rate * 2**64:
            break
        nodes.append(child)
        emitted.append(tree.tokens[child])
    return AcceptedPath(tuple(nodes), (*emitted, chosen[nodes[-1]]))
