"""Trees as tensors, row by row and node by node.

A window's nodes stand in topological order: node 0 is the root, whose parent is -1, and every other parent
comes before its children. Siblings never share a token. A node of token -1 fills a row up: no walk goes
there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.reference import MASK64, splitmix64
from specdec.kernels.sampling.rules import NO_TOKEN


def relations(parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each node's depth, its ancestors with itself, and the `taps` inputs of its convolution.

    Those are indices into the taps-1 inputs before the window followed by the window's own, oldest first.
    """
    depths, ancestors, inputs = [], [], []
    for parents in parent_BM.tolist():
        paths: list[list[int]] = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), i])
        before = list(range(taps - 1))
        depths.append([len(path) - 1 for path in paths])
        ancestors.append([[j in path for j in range(len(parents))] for path in paths])
        inputs.append([[*before, *(taps - 1 + j for j in path)][-taps:] for path in paths])
    device = parent_BM.device
    return _ids(depths, device), torch.tensor(ancestors, device=device), _ids(inputs, device)


def walk(chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the chosen token from the root on to the child that drafted it, until no child did.

    Return the nodes that are kept, the root first, and how many they are; from there on every entry is its
    own index, so that moving what the nodes wrote to where the text goes on leaves the rest in place. A node
    at which no token was chosen is not kept: the walk ends at it, and may keep nothing.
    """
    kept, counts = [], []
    rows = zip(chosen_BM.tolist(), token_BM.tolist(), parent_BM.tolist(), strict=True)
    for chosen, tokens, parents in rows:
        path = walk_row(chosen, tokens, parents)
        if chosen[path[-1]] == NO_TOKEN:
            path.pop()
        kept.append([*path, *range(len(path), len(tokens))])
        counts.append(len(path))
    return _ids(kept, chosen_BM.device), _ids(counts, chosen_BM.device)


def walk_row(chosen: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Walk one tree; return the nodes, also a last one at which no token was chosen."""
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True)) if edge[1] != NO_TOKEN}
    path = [0]
    while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(child)
    return path


def accept_at_rates(
    chosen_BM: Tensor,
    token_BM: Tensor,
    parent_BM: Tensor,
    rate_N: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rewrite choices and tokens so that a walk takes each node's first child at the rate of its depth.

    The rate (float64) is compared with a draw from seed and position; `position` is that of the token chosen
    at the root. A node that is taken becomes its parent's choice; any other loses its token.
    """
    columns = (x.tolist() for x in (chosen_BM, token_BM, parent_BM, seed_B, position_B))
    rewritten = [
        accept_row(chosen, tokens, parents, rate_N.tolist(), seed=seed, position=position)
        for chosen, tokens, parents, seed, position in zip(*columns, strict=True)
    ]
    chosen, tokens = zip(*rewritten, strict=True)
    return _ids(chosen, chosen_BM.device), _ids(tokens, chosen_BM.device)


def accept_row(
    chosen: Sequence[int],
    tokens: Sequence[int],
    parents: Sequence[int],
    rates: Sequence[float],
    *,
    seed: int,
    position: int,
) -> tuple[list[int], list[int]]:
    """Rewrite one tree's choices and tokens."""
    new_chosen, new_tokens = list(chosen), [tokens[0], *[NO_TOKEN] * (len(tokens) - 1)]
    has_child, depths = set[int](), [0]
    for node, parent in list(enumerate(parents))[1:]:
        depths.append(depths[parent] + 1)
        if tokens[node] == NO_TOKEN or parent in has_child:
            continue
        has_child.add(parent)
        depth = depths[parent]
        drawn = splitmix64(splitmix64(seed & MASK64) ^ (position + depth))
        if depth < len(rates) and drawn < rates[depth] * 2**64:
            new_chosen[parent] = new_tokens[node] = tokens[node]
    return new_chosen, new_tokens


def promote(
    node_BM: Tensor,
    count_B: Tensor,
    record: RecordIds,
    path: RecordIds,
    path_length_B: Tensor,
    length_B: Tensor,
) -> None:
    """Make the kept nodes' records the row's path and add their number to its committed length, in place.

    What lies behind a path in its table is not touched. A row of length 0 is padding, and stays as it is.
    """
    for b, count in enumerate(count_B.tolist()):
        if length_B[b] == 0:
            continue
        for i, node in enumerate(node_BM[b, :count].tolist()):
            path.slab_BN[b, i] = record.slab_BN[b, node]
            path.index_BN[b, i] = record.index_BN[b, node]
        path_length_B[b] = count
        length_B[b] += count


def children(share_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor:
    """Return the scores [B, F, K] of the children of F nodes, whose own scores are given, in float64.

    A child's chance is the drafter's share of it, at most 1, times the gain of its depth (1: the root's
    children) and rank, held between the least and the greatest chance there: the table's three parts. The
    last depth and the last rank stand for all beyond. At most one child is accepted and their order stays: no
    chance is above the one before it, and together they come to 1 at most.
    """
    rows, nodes, ranks = share_BFK.shape
    table = table_3DR.tolist()
    score_BFK = torch.empty(share_BFK.shape, dtype=torch.float64, device=share_BFK.device)
    for b in range(rows):
        for f in range(nodes):
            chances: list[float] = []
            for rank, share in enumerate(share_BFK[b, f].tolist()):
                gain, least, most = (part[min(depth, len(part)) - 1] for part in table)
                at = min(rank, len(gain) - 1)
                chance = min(max(min(share, 1.0) * gain[at], least[at]), most[at])
                chances.append(min([chance, *chances]))
            total = 0.0
            for chance in chances:
                total += chance
            for rank in range(ranks):
                chance = chances[rank] if total <= 1 else chances[rank] / total
                score_BFK[b, f, rank] = float(score_BF[b, f]) * chance
    return score_BFK


def frontier(score_BN: Tensor, count: int) -> Tensor:
    """Return the `count` best of a level by score, the best first; of equals the earlier is better."""
    return _ids([_by_score(scores)[:count] for scores in score_BN.tolist()], score_BN.device)


def prune(
    token_BN: Tensor, parent_BN: Tensor, score_BN: Tensor, belief_BN: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the `count` best nodes by score, in their order; of equals the earlier is better.

    Node 0 is the root, with score 1. A parent scores no less than its children and comes before them, so that
    it is kept where they are.
    """
    kept_BM = _ids([sorted(_by_score(scores)[:count]) for scores in score_BN.tolist()], score_BN.device)
    parents = []
    for kept, own in zip(kept_BM.tolist(), parent_BN.tolist(), strict=True):
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        parents.append([place[own[node]] for node in kept])
    token_BM, score_BM, belief_BM = (x.gather(1, kept_BM) for x in (token_BN, score_BN, belief_BN))
    return token_BM, _ids(parents, score_BN.device), score_BM, belief_BM


def _by_score(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda node: -scores[node])


def _ids(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
