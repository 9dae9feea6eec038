"""Trees as tensors, row by row; `row.py` defines a tree and each operation on it."""

import torch
from torch import Tensor

from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.kernels.tree import row


def relations(parent_BM: Tensor, taps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each node's depth, its ancestors including itself, and the `taps` inputs of its convolution.

    The inputs are indices into the taps-1 inputs before the window followed by the window's own, oldest
    first.
    """
    trees, node_M = parent_BM.tolist(), range(parent_BM.shape[1])
    ancestors = [[[mask >> j & 1 for j in node_M] for mask in row.ancestor_masks(tree)] for tree in trees]
    depths, inputs = list(map(row.depths, trees)), [row.taps(tree, taps) for tree in trees]
    device = parent_BM.device
    return _ids(depths, device), torch.tensor(ancestors, device=device).bool(), _ids(inputs, device)


def walk(chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the chosen tokens from the root until no child has the chosen token.

    Return the accepted nodes, the root first, and their count. Entries after the count are their own index,
    so moving the nodes' KV to its committed position leaves the rest unchanged. A node with no chosen token
    ends the walk and is not accepted, so the count may be 0.
    """
    paths, counts = [], []
    rows = zip(chosen_BM.tolist(), token_BM.tolist(), parent_BM.tolist(), strict=True)
    for chosen, tokens, parents in rows:
        path = row.walk(chosen, tokens, parents)
        if chosen[path[-1]] == NO_TOKEN:
            path.pop()
        paths.append([*path, *range(len(path), len(tokens))])
        counts.append(len(path))
    return _ids(paths, chosen_BM.device), _ids(counts, chosen_BM.device)


def accept_at_rates(
    chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, rate_N: Tensor, seed_B: Tensor, position_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewrite choices and tokens so that a walk accepts each node's first child at the rate of its depth.

    The rate (float64) is compared with a random draw from seed and position; `position` is that of the token
    chosen at the root. An accepted node becomes its parent's choice; any other loses its token.
    """
    columns = (x.tolist() for x in (chosen_BM, token_BM, parent_BM, seed_B, position_B))
    rewritten = [
        row.accept_at_rates(chosen, tokens, parents, rate_N.tolist(), seed=seed, position=position)
        for chosen, tokens, parents, seed, position in zip(*columns, strict=True)
    ]
    chosen, tokens = zip(*rewritten, strict=True)
    return _ids(chosen, chosen_BM.device), _ids(tokens, chosen_BM.device)


def promote(
    node_BM: Tensor,
    count_B: Tensor,
    record: RecordIds,
    path: RecordIds,
    path_length_B: Tensor,
    length_B: Tensor,
) -> None:
    """Make the accepted nodes' records the row's path and add their count to its committed length, in place.

    Table entries behind a path's end are unchanged. A row of length 0 is padding and is unchanged.
    """
    for b, count in enumerate(count_B.tolist()):
        if length_B[b] == 0:
            continue
        for i, node in enumerate(node_BM[b, :count].tolist()):
            path.slab_BN[b, i] = record.slab_BN[b, node]
            path.index_BN[b, i] = record.index_BN[b, node]
        path_length_B[b] = count
        length_B[b] += count


def children(prob_BFK: Tensor, score_BF: Tensor, depth: int, table_3DR: Tensor) -> Tensor:
    """Return the scores [B, F, K] of the children of F nodes with the given scores, in float64.

    A child's acceptance probability is the drafter's probability, at most 1, times the gain of its depth (1:
    the root's children) and rank, clamped between a minimum and a maximum: the table's three parts. The last
    depth and rank also apply to all beyond. At most one child is accepted and their order is fixed, so
    probabilities never increase with rank and sum to at most 1.
    """
    ranks = prob_BFK.shape[2]
    parts = [part[min(depth, len(part)) - 1] for part in table_3DR.tolist()]
    gains, least, most = ([*part, *[part[-1]] * ranks] for part in parts)
    chances = [
        [row.siblings([min(prob, 1.0) for prob in probs], gains, least, most) for probs in nodes]
        for nodes in prob_BFK.tolist()
    ]
    chance_BFK = torch.tensor(chances, dtype=torch.float64, device=prob_BFK.device)
    return score_BF.double()[..., None] * chance_BFK


def frontier(score_BN: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` best scores of a level, best first; ties go to the earlier node."""
    return _ids([row.by_score(scores)[:count] for scores in score_BN.tolist()], score_BN.device)


def prune(
    token_BN: Tensor, parent_BN: Tensor, score_BN: Tensor, belief_BN: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the `count` best nodes by score, in their original order; ties go to the earlier node.

    Node 0 is the root, with score 1. A parent scores no less than its children and precedes them, so the
    parents of retained nodes are retained.
    """
    kept_BM = frontier(score_BN, count).sort(-1).values
    parents = list(map(row.renumber, parent_BN.tolist(), kept_BM.tolist()))
    token_BM, score_BM, belief_BM = (x.gather(1, kept_BM) for x in (token_BN, score_BN, belief_BN))
    return token_BM, _ids(parents, score_BN.device), score_BM, belief_BM


def _ids(values: object, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
