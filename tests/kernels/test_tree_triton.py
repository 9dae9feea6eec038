"""Trees on a GPU equal those of plain torch, bit for bit, and so the host's own."""

import random

import pytest
import torch
from torch import Tensor

from specdec.draft.proposal import DraftShape
from specdec.kernels.group import RecordIds
from specdec.kernels.tree import cpu, triton
from tests.kernels import drafted_trees as draws

ROWS = 6
WIDTHS = (1, 2, 5, 8, 16, 63, 64)
SEEDS = torch.tensor([0, -1, 7, 2**63 - 1, -(2**63), 123456789012345678])
POSITIONS = torch.tensor([1, 131_071, 2**40, 5, 9, 2**31])


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == wanted.dtype and torch.equal(actual, wanted)


def draw_window(width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw choices, tokens and parents; one row is padded with unused nodes at its end."""
    rng = random.Random(f"{width} {seed}")
    trees = [draws.draw_tree(rng, width) for _ in range(ROWS)]
    chosen = draws.stack([draws.draw_choices(rng, tree) for tree in trees])
    token_BM, parent_BM = draws.windows(trees)
    if width > 3:
        token_BM[1, -2:], parent_BM[1, -2:] = -1, 0
    return chosen, token_BM, parent_BM


@pytest.mark.parametrize("width", WIDTHS)
def test_relations_and_walks_equal_torch(width: int) -> None:
    for seed in range(3 if width < 16 else 1):
        chosen_BM, token_BM, parent_BM = draw_window(width, seed)
        for taps in (1, 4):
            assert_same(triton.relations(parent_BM, taps), cpu.relations(parent_BM, taps))
        window = chosen_BM, token_BM, parent_BM
        assert_same(triton.walk(*window), cpu.walk(*window))
        for rates in ((), (1.0,) * 70, (1.0, 0.8, 2.0**-40), (0.9,) * 9):
            place = torch.tensor(rates, dtype=torch.float64), SEEDS, POSITIONS + seed
            assert_same(triton.accept_at_rates(*window, *place), cpu.accept_at_rates(*window, *place))


def test_a_window_that_is_a_view_is_read_in_place() -> None:
    window = [x.T.contiguous().T for x in draw_window(8)]
    assert not window[0].is_contiguous()
    assert_same(triton.walk(*window), cpu.walk(*window))
    assert_same(triton.relations(window[2], 4), cpu.relations(window[2], 4))


@pytest.mark.parametrize("width", WIDTHS)
def test_promoting_writes_the_same_bytes(width: int) -> None:
    node_BM, count_B = cpu.walk(*draw_window(width))
    record = RecordIds(torch.randint(1, 99, (ROWS, width)), torch.randint(0, 80, (ROWS, width)))
    tables = {}
    for ops in (cpu, triton):
        wide = [torch.full((ROWS, width + 7), -7) for _ in range(2)]
        path = RecordIds(*(table[:, 2 : width + 4] for table in wide))
        path_length_B, length_B = torch.full((ROWS,), -7), torch.tensor([0, 5, 1, 0, 100_000, 2**33])
        ops.promote(node_BM, count_B, record, path, path_length_B, length_B)
        tables[ops] = (*wide, path_length_B, length_B)
    assert_same(tables[triton], tables[cpu])
    assert tables[cpu][3][0] == 0 and tables[cpu][2][0] == -7


def test_growing_gives_the_growers_tree_bit_for_bit() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        shape = DraftShape(rng.randint(1, 4), rng.randint(1, 4), rng.randint(2, 24))
        calibrator = draws.draw_calibrator(rng)
        levels = draws.draw_levels(rng, 3, shape)
        table_3DR = torch.tensor(calibrator.table(), dtype=torch.float64)
        found = draws.grow(triton, levels, shape, table_3DR)
        assert_same(found, draws.grow(cpu, levels, shape, table_3DR))
        assert draws.proposals_of(found) == [
            draws.grow_on_host(levels, b, shape, calibrator) for b in range(3)
        ]


@pytest.mark.parametrize(("size", "count"), [(1, 1), (1, 3), (20, 7), (65, 63), (200, 20)])
def test_many_equal_scores_are_ranked_equally(size: int, count: int) -> None:
    rng = random.Random(size)
    tree = draws.draw_tree(rng, size + 1, vocabulary=300)
    scores = [[1.0] for _ in range(ROWS)]
    for parent in tree.parents[1:]:
        for score in scores:
            score.append(score[parent] * rng.choice((0.5, 1.0)))
    score_BN = torch.tensor(scores, dtype=torch.float64)
    nodes = *draws.windows([tree] * ROWS), score_BN, score_BN * 0.5
    assert_same((triton.frontier(score_BN, count),), (cpu.frontier(score_BN, count),))
    assert_same(triton.prune(*nodes, count), cpu.prune(*nodes, count))


def test_a_swapped_parent_is_seen() -> None:
    chosen_BM, token_BM, parent_BM = draw_window(16)
    swapped_BM = torch.where(parent_BM > 0, parent_BM - 1, parent_BM)
    pairs = zip(triton.relations(swapped_BM, 4), cpu.relations(parent_BM, 4), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs)
    chosen_BM = torch.where(chosen_BM < 0, 0, chosen_BM)
    assert not torch.equal(
        triton.walk(chosen_BM, token_BM, swapped_BM)[1], cpu.walk(chosen_BM, token_BM, parent_BM)[1]
    )
