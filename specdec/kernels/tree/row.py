"""One row's tree as Python sequences: used by the host, and by the reference for every row.

Nodes are in topological order: node 0 is the root, whose parent is -1, and every parent precedes its
children. Siblings never share a token. A node of token -1 is padding that no walk enters.
"""

import math
from collections.abc import Iterable, Sequence

from specdec.kernels.sampling.reference import MASK64, splitmix64
from specdec.kernels.sampling.rules import NO_TOKEN


def depths(parents: Sequence[int]) -> list[int]:
    """Return each node's depth below the root."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Return bit masks: bit j of entry i is set if node j is an ancestor of i, or i itself."""
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


def taps(parents: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Return each node's input indices for a convolution of `width`, oldest first.

    Indices count the width-1 inputs before the window and then the window's own, so a path continues above
    the root into the inputs before the window.
    """
    before = width - 1
    result: list[tuple[int, ...]] = []
    for i, parent in enumerate(parents):
        above = result[parent][1:] if parent >= 0 else tuple(range(before))
        result.append((*above, before + i))
    return result


def walk(chosen: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Follow the chosen tokens from the root; return the path, including a last node with no choice."""
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True)) if edge[1] != NO_TOKEN}
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path


def accept_at_rates(
    chosen: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    rates: Sequence[float],
    *,
    seed: int,
    position: int,
) -> tuple[list[int], list[int]]:
    """Rewrite choices and tokens so that a walk accepts each node's first child at the rate of its depth."""
    new_chosen, new_tokens = list(chosen), [tokens[0], *[NO_TOKEN] * (len(tokens) - 1)]
    has_child, depth = set[int](), depths(parents)
    for node, parent in list(enumerate(parents))[1:]:
        if tokens[node] == NO_TOKEN or parent in has_child:
            continue
        has_child.add(parent)
        drawn = splitmix64(splitmix64(seed & MASK64) ^ (position + depth[parent]))
        if depth[parent] < len(rates) and drawn < rates[depth[parent]] * 2**64:
            new_chosen[parent] = new_tokens[node] = tokens[node]
    return new_chosen, new_tokens


def siblings(
    probs: Iterable[float], gains: Iterable[float], least: Iterable[float], most: Iterable[float]
) -> list[float]:
    """Return the acceptance probabilities of a node's children from the drafter's, in descending order.

    Each is the drafter's probability times the gain of its rank, clamped to the bounds of its rank. At most
    one child is accepted and their order is fixed: no probability exceeds the one before it, and they sum to
    at most 1.
    """
    result: list[float] = []
    bound, total = math.inf, 0.0
    for prob, gain, low, high in zip(probs, gains, least, most, strict=False):
        bound = min(bound, max(prob * gain, low), high)
        result.append(bound)
        # Add sequentially like the device: some Python versions' `sum` rounds differently.
        total += bound
    return result if total <= 1 else [chance / total for chance in result]


def by_score(scores: Sequence[float]) -> list[int]:
    """Sort nodes by score, best first; ties go to the earlier node."""
    return sorted(range(len(scores)), key=lambda node: -scores[node])


def renumber(parents: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Return the parents of the retained nodes, as indices into the retained nodes."""
    new_index = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return [new_index[parents[node]] for node in kept]
