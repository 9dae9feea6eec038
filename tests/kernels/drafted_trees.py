"""Random windows and tree growths for the tree kernels, and the host classes' results for them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from specdec.draft.calibration import AcceptanceTally, AssumedRates, Calibrator
from specdec.draft.grow import Grower
from specdec.draft.proposal import DraftShape, Proposal
from specdec.kernels.sampling.rules import NO_TOKEN
from specdec.state_slots.tree import TokenTree
from specdec.verify.walk import AcceptedPath


def draw_tree(rng: random.Random, width: int, vocabulary: int = 5) -> TokenTree:
    """Draw a deep or flat tree over few tokens, without equal siblings."""
    reach = rng.choice((1, 2, 4, width))
    tokens, parents, edges = [rng.randrange(vocabulary)], [-1], set()
    while len(tokens) < width:
        parent = rng.randrange(max(0, len(tokens) - reach), len(tokens))
        edge = parent, rng.randrange(vocabulary)
        if edge in edges:
            edge = len(tokens) - 1, edge[1]
        edges.add(edge)
        parents.append(edge[0])
        tokens.append(edge[1])
    return TokenTree(tuple(tokens), tuple(parents))


def draw_choices(rng: random.Random, tree: TokenTree, vocabulary: int = 5) -> list[int]:
    """Choose a token at each node: usually a child's, or any, or rarely none."""
    chosen = []
    for node in range(len(tree)):
        drafted = [token for token, parent in zip(tree.tokens, tree.parents, strict=True) if parent == node]
        anything = rng.choices((rng.randrange(vocabulary), NO_TOKEN), (9, 1))[0]
        chosen.append(rng.choice(drafted) if drafted and rng.random() < 0.8 else anything)
    return chosen


def stack(rows: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def windows(trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor]:
    """Return the tokens and the parents of trees of equal width."""
    return stack([tree.tokens for tree in trees]), stack([tree.parents for tree in trees])


def kept_part(path: AcceptedPath) -> AcceptedPath:
    """Drop a last node at which no token was chosen, as the decode loop does."""
    if path.emitted[-1] != NO_TOKEN:
        return path
    return AcceptedPath(path.nodes[:-1], path.emitted[:-1])


def padded(path: AcceptedPath, width: int) -> tuple[list[int], int, list[int]]:
    """Return a path in the kernels' format: nodes, their count, and the tokens gained."""
    count = len(path.nodes)
    return (
        [*path.nodes, *range(count, width)],
        count,
        [*path.emitted, *[NO_TOKEN] * (width - len(path.emitted))],
    )


def draw_calibrator(rng: random.Random) -> Calibrator:
    """Draw a calibrator with many, few or no observations, whose last depth and rank are shared."""
    if rng.random() < 0.2:
        return AssumedRates([rng.choice((0.0, 0.5, 0.93, 1.0)) for _ in range(rng.randrange(4))])
    calibrator = Calibrator(max_depth=rng.choice((2, 8)), max_rank=rng.choice((1, 3, 8)))
    for row in calibrator.tallies:
        for rank in range(len(row)):
            seen = rng.choice((0.0, 3.0, 900.0))
            row[rank] = AcceptanceTally(
                seen, seen * rng.choice((0.001, 0.3, 1.0)), seen * rng.choice((0.0, 0.5, 1.0))
            )
    return calibrator


@dataclass(frozen=True, slots=True)
class Level:
    """A model's ranking of the frontier: each node's children, likeliest first."""

    token_BFK: Tensor
    share_BFK: Tensor


def draw_levels(rng: random.Random, rows: int, shape: DraftShape) -> list[Level]:
    """Draw shares that often tie, within a node and across nodes; rounding lifts some above 1."""
    many = rng.random() < 0.5
    levels = []
    for depth in range(shape.num_steps):
        nodes = shape.topk if depth else 1
        drawn = [
            rng.choice((0.0, 0.125, 0.25, 0.5, 1.0, 1 + 2**-20)) for _ in range(rows * nodes * shape.topk)
        ]
        if not many:
            drawn = [rng.random() for _ in drawn]
        share_BFK = torch.tensor(drawn).view(rows, nodes, shape.topk).sort(-1, descending=True).values
        tokens = [rng.sample(range(40), shape.topk) for _ in range(rows * nodes)]
        levels.append(Level(stack(tokens).view(rows, nodes, shape.topk), share_BFK))
    return levels


def grow_on_host(levels: Sequence[Level], row: int, shape: DraftShape, calibrator: Calibrator) -> Proposal:
    grower = Grower(0, shape, calibrator)
    for level in levels:
        for f, node in enumerate(grower.frontier):
            grower.add(node, level.token_BFK[row, f].tolist(), level.share_BFK[row, f].tolist())
    assert not grower.frontier
    return grower.finish()


def grow(
    ops: ModuleType, levels: Sequence[Level], shape: DraftShape, table_3DR: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grow all rows together as a captured step does, from a root of token 0; return `prune`'s output."""
    rows, topk = len(levels[0].token_BFK), shape.topk
    node_BF = torch.zeros(rows, 1, dtype=torch.int64)
    score_BF = torch.ones(rows, 1, dtype=torch.float64)
    tokens, parents, scores, beliefs, start = [node_BF], [node_BF - 1], [score_BF], [score_BF], 1
    for depth, level in enumerate(levels, start=1):
        score_BN = ops.children(level.share_BFK, score_BF, depth, table_3DR).flatten(1)
        tokens.append(level.token_BFK.flatten(1))
        parents.append(node_BF.repeat_interleave(topk, 1))
        scores.append(score_BN)
        beliefs.append(level.share_BFK.double().clamp(max=1).flatten(1))
        index_BF = ops.frontier(score_BN, topk)
        node_BF, score_BF = start + index_BF, score_BN.gather(1, index_BF)
        start += score_BN.shape[1]
    return ops.prune(
        *(torch.cat(parts, 1) for parts in (tokens, parents, scores, beliefs)), shape.num_draft_tokens
    )


def synthetic_walk(
    ops: ModuleType, chosen_BM: Tensor, token_BM: Tensor, parent_BM: Tensor, *draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk along the choices rewritten at fixed rates; return nodes, counts and the tokens gained."""
    own_BM, left_BM = ops.accept_at_rates(chosen_BM, token_BM, parent_BM, *draws)
    node_BM, count_B = ops.walk(own_BM, left_BM, parent_BM)
    beyond_BM = torch.arange(node_BM.shape[1]) >= count_B[:, None]
    return node_BM, count_B, own_BM.gather(1, node_BM).masked_fill(beyond_BM, NO_TOKEN)


def proposals_of(pruned: Sequence[Tensor]) -> list[Proposal]:
    """Convert the output of `prune` to proposals."""
    found = []
    for tokens, parents, scores, beliefs in zip(*(part.tolist() for part in pruned), strict=True):
        tree = TokenTree(tuple(tokens), tuple(parents))
        found.append(Proposal(tree, tuple(scores), tuple(beliefs)))
    return found
