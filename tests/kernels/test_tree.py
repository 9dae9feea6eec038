"""Trees as tensors against the host's classes: the same nodes, and the same floats."""

import random
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec.draft.proposal import DraftShape, Proposal
from specdec.kernels.group import RecordIds
from specdec.kernels.sampling.reference import splitmix64
from specdec.kernels.tree import cpu, reference
from specdec.state_slots.tree import TokenTree
from specdec.verify.synthetic import accept_at_rates
from specdec.verify.walk import AcceptedPath, walk
from tests.kernels import drafted_trees as draws

WIDTHS = (1, 2, 3, 8, 16, 63, 64)
FORMS = pytest.mark.parametrize(("ops", "rows"), [(cpu, 300), (reference, 40)], ids=["cpu", "reference"])
SEEDS = (0, -1, 7, 2**63 - 1, -(2**63), 123456789012345678)


def many_trees(rng: random.Random, rows: int, width: int) -> list[TokenTree]:
    return [draws.draw_tree(rng, width) for _ in range(rows)]


@FORMS
@pytest.mark.parametrize("width", WIDTHS)
def test_relations_equal_the_token_tree(ops: ModuleType, rows: int, width: int) -> None:
    trees = many_trees(random.Random(width), rows, width)
    _, parent_BM = draws.windows(trees)
    for taps in (1, 4, 7):
        depth_BM, ancestors_BMM, tap_BMC = ops.relations(parent_BM, taps)
        assert ancestors_BMM.dtype == torch.bool
        for b, tree in enumerate(trees):
            paths = [tree.path(node) for node in range(width)]
            assert depth_BM[b].tolist() == tree.depths == [len(path) - 1 for path in paths]
            assert ancestors_BMM[b].tolist() == [[j in path for j in range(width)] for path in paths]
            inputs = [(*range(taps - 1), *(taps - 1 + j for j in path))[-taps:] for path in paths]
            assert tap_BMC[b].tolist() == list(map(list, inputs))


@FORMS
@pytest.mark.parametrize("width", WIDTHS)
def test_walk_is_the_walk_of_the_host(ops: ModuleType, rows: int, width: int) -> None:
    rng = random.Random(width)
    trees = many_trees(rng, rows, width)
    chosen = [draws.draw_choices(rng, tree) for tree in trees]
    node_BM, count_B = ops.walk(draws.stack(chosen), *draws.windows(trees))
    expected = [draws.kept_part(walk(own, tree)) for own, tree in zip(chosen, trees, strict=True)]
    padded = [draws.padded(path, width) for path in expected]
    assert node_BM.tolist() == [nodes for nodes, _, _ in padded]
    assert count_B.tolist() == [count for _, count, _ in padded]
    # Gathering the chosen tokens along the walk gives the host's result.
    gained_BM = draws.stack(chosen).gather(1, node_BM)
    gained = [own[: len(path.nodes)] for own, path in zip(gained_BM.tolist(), expected, strict=True)]
    assert gained == [list(path.emitted) for path in expected]
    assert width < 3 or len(set(count_B.tolist())) > 2


def test_a_node_that_fills_a_row_up_is_never_walked_to() -> None:
    """Even if no token was chosen, which is encoded like the padding node's token."""
    token_BM, parent_BM = (
        draws.stack([[5, 6, -1, 7], [5, -1, 6, 7]]),
        draws.stack([[-1, 0, 0, 1], [-1, 0, 0, 2]]),
    )
    chosen_BM = draws.stack([[-1, 7, 0, 0], [6, 0, -1, 0]])
    for ops in (cpu, reference):
        node_BM, count_B = ops.walk(chosen_BM, token_BM, parent_BM)
        assert count_B.tolist() == [0, 1]
        assert node_BM.tolist() == [[0, 1, 2, 3]] * 2
        one = torch.ones(3, dtype=torch.float64)
        zero_B = torch.zeros(2, dtype=torch.int64)
        nines_BM = draws.stack([[9] * 4] * 2)
        nodes, counts, emitted = draws.synthetic_walk(ops, nines_BM, token_BM, parent_BM, one, zero_B, zero_B)
        assert nodes.tolist() == [[0, 1, 3, 3], [0, 2, 3, 3]] and counts.tolist() == [3, 3]
        assert emitted.tolist() == [[6, 7, 9, -1]] * 2


@FORMS
def test_walks_with_a_swapped_parent_are_caught(ops: ModuleType, rows: int) -> None:
    rng = random.Random(3)
    trees = many_trees(rng, rows, 8)
    chosen = [draws.draw_choices(rng, tree) for tree in trees]
    swapped = [TokenTree(t.tokens, (-1, *(max(p - 1, 0) for p in t.parents[1:]))) for t in trees]
    _, count_B = ops.walk(draws.stack(chosen), *draws.windows(swapped))
    expected = [len(draws.kept_part(walk(own, tree)).nodes) for own, tree in zip(chosen, trees, strict=True)]
    assert sum(a != b for a, b in zip(count_B.tolist(), expected, strict=True)) > rows / 10
    right, wrong = (ops.relations(draws.windows(own)[1], 4) for own in (trees, swapped))
    assert not any(torch.equal(a, b) for a, b in zip(right, wrong, strict=True))


@FORMS
@pytest.mark.parametrize("width", WIDTHS)
def test_synthetic_walk_is_the_hosts(ops: ModuleType, rows: int, width: int) -> None:
    rng = random.Random(width)
    for rates in ((), (0.0,), (1.0,) * 70, (0.9, 0.3, 1.0, 0.5), tuple(rng.random() for _ in range(20))):
        trees = many_trees(rng, rows, width)
        chosen = [[rng.choices((node + 100, -1), (6, 1))[0] for node in range(width)] for _ in trees]
        starts = [(rng.choice((*SEEDS, rng.getrandbits(62))), rng.choice((1, 131071, 2**40))) for _ in trees]
        expected = [
            draws.padded(
                draws.kept_part(walk(*accept_at_rates(own, tree, rates, seed=seed, position=position))), width
            )
            for own, tree, (seed, position) in zip(chosen, trees, starts, strict=True)
        ]
        seed_B, position_B = draws.stack(starts).unbind(1)
        rate_N = torch.tensor(rates, dtype=torch.float64)
        found = draws.synthetic_walk(
            ops, draws.stack(chosen), *draws.windows(trees), rate_N, seed_B, position_B
        )
        for actual, wanted in zip(found, zip(*expected, strict=True), strict=True):
            assert actual.tolist() == list(wanted)


@pytest.mark.parametrize("ops", [cpu, reference])
def test_a_draw_is_compared_with_its_rate_as_an_integer(ops: ModuleType) -> None:
    """Bounds next to the drawn number itself, where the last bit decides."""
    tree, outcomes = TokenTree.chain((1, 2)), set()
    for position in range(60):
        drawn = splitmix64(splitmix64(5) ^ position)
        near = drawn / 2**64
        smaller, greater = (float(torch.nextafter(*torch.tensor([near, end]).double())) for end in (0, 1))
        for rate in (smaller, near, greater, 2.0**-64, 1 - 2.0**-53, 0.5, 2.0**-32):
            expected = walk(*accept_at_rates((8, 9), tree, (rate,), seed=5, position=position))
            rate_N = torch.tensor([rate], dtype=torch.float64)
            node_BM, count_B, emitted_BM = draws.synthetic_walk(
                ops,
                draws.stack([[8, 9]]),
                *draws.windows([tree]),
                rate_N,
                torch.tensor([5]),
                torch.tensor([position]),
            )
            assert (node_BM.tolist()[0], int(count_B), emitted_BM.tolist()[0]) == draws.padded(expected, 2)
            outcomes.add((rate in (smaller, near, greater), len(expected.nodes)))
    assert outcomes >= {(True, 1), (True, 2)}


@FORMS
def test_promoting_writes_the_paths_records_and_nothing_else(ops: ModuleType, rows: int) -> None:
    rng, width, longest = random.Random(0), 8, 11
    trees = many_trees(rng, rows, width)
    chosen = draws.stack([draws.draw_choices(rng, tree) for tree in trees])
    node_BM, count_B = ops.walk(chosen, *draws.windows(trees))
    record = RecordIds(torch.randint(1, 99, (rows, width)), torch.randint(0, 80, (rows, width)))
    path = RecordIds(torch.full((rows, longest), -7), torch.full((rows, longest), -7))
    length_B = torch.tensor([rng.choice((0, 5, 100_000)) for _ in range(rows)])
    path_length_B, before_B = torch.full((rows,), -7), length_B.clone()
    ops.promote(node_BM, count_B, record, path, path_length_B, length_B)
    for b in range(rows):
        kept = node_BM[b, : int(count_B[b])] if before_B[b] else node_BM[b, :0]
        for to_BP, from_BM in zip(path, record, strict=True):
            assert to_BP[b].tolist() == [*from_BM[b, kept].tolist(), *[-7] * (longest - len(kept))]
        assert length_B[b] == before_B[b] + len(kept)
        assert path_length_B[b] == (len(kept) if before_B[b] else -7)


def draw_shape(rng: random.Random) -> DraftShape:
    return DraftShape(rng.randint(1, 5), rng.randint(1, 4), rng.randint(2, 24))


def growths_that_differ(ops: ModuleType | SimpleNamespace, cases: int, rows: int) -> int:
    """Grow with the kernels and on the host; count the rows whose nodes or floats differ."""
    different = 0
    for seed in range(cases):
        rng = random.Random(seed)
        shape, calibrator = draw_shape(rng), draws.draw_calibrator(rng)
        levels = draws.draw_levels(rng, rows, shape)
        table_3DR = torch.tensor(calibrator.table(), dtype=torch.float64)
        try:
            found = draws.proposals_of(draws.grow(ops, levels, shape, table_3DR))
        except AssertionError:  # a mutant's result may not be a tree
            found = [Proposal.bare(0)] * rows
        expected = [draws.grow_on_host(levels, b, shape, calibrator) for b in range(rows)]
        different += sum(a != b for a, b in zip(found, expected, strict=True))
    return different


@pytest.mark.parametrize(("ops", "cases"), [(cpu, 500), (reference, 40)], ids=["cpu", "reference"])
def test_growing_gives_the_growers_tree_bit_for_bit(ops: ModuleType, cases: int) -> None:
    assert growths_that_differ(ops, cases, rows=8) == 0


@pytest.mark.parametrize("part", ["children", "frontier", "prune"])
def test_growing_otherwise_is_caught(part: str) -> None:
    """Single precision, ties for the later, and a parent that is not renumbered."""

    def narrow(*arguments: object) -> Tensor:
        return cpu.children(*arguments).float().double()  # type: ignore[arg-type]

    def later(score_BN: Tensor, count: int) -> Tensor:
        return score_BN.shape[1] - 1 - cpu.frontier(score_BN.flip(1), count)

    def stale(*arguments: object) -> tuple[Tensor, ...]:
        token_BM, _, *rest = cpu.prune(*arguments)  # type: ignore[arg-type]
        parent_BM = arguments[1][:, : token_BM.shape[1]]  # type: ignore[index]
        return token_BM, parent_BM, *rest

    right = {name: getattr(cpu, name) for name in ("children", "frontier", "prune")}
    mutant = SimpleNamespace(**right | {part: {"children": narrow, "frontier": later, "prune": stale}[part]})
    assert growths_that_differ(mutant, 40, rows=4) > 20


@FORMS
def test_pruning_equals_the_proposals(ops: ModuleType, rows: int) -> None:
    """Also for trees that were not grown level by level."""
    rng = random.Random(1)
    for size, count in ((1, 1), (5, 9), (12, 4), (63, 20), (65, 63)):
        trees, weights, proposals = [], [], []
        for _ in range(rows // 10):
            tree = draws.draw_tree(rng, size + 1, vocabulary=80)
            scores = [1.0]
            for parent in tree.parents[1:]:
                scores.append(scores[parent] * rng.choice((0.5, 1.0)))
            trees.append(tree)
            weights.append((scores, [1.0, *(rng.random() for _ in tree.parents[1:])]))
            proposals.append(Proposal(tree, *map(tuple, weights[-1])))
        score_BN, belief_BN = torch.tensor(weights, dtype=torch.float64).unbind(1)
        pruned = ops.prune(*draws.windows(trees), score_BN, belief_BN, count + 1)
        expected = [proposal.best(count + 1) for proposal in proposals]
        assert draws.proposals_of(pruned) == expected


def test_no_tensor_value_is_read_on_the_host() -> None:
    """Fake tensors pass through every function: reading a value on the host would fail."""
    rows, width, levels, topk = 3, 8, 3, 4
    with FakeTensorMode():
        ids_BM, float_B = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, dtype=torch.float64)
        ids_B, record = ids_BM[:, 0], RecordIds(ids_BM, ids_BM)
        cpu.relations(ids_BM, 4)
        node_BM, count_B = cpu.walk(ids_BM, ids_BM, ids_BM)
        cpu.accept_at_rates(ids_BM, ids_BM, ids_BM, float_B, ids_B, ids_B)
        path = RecordIds(torch.zeros_like(ids_BM), torch.zeros_like(ids_BM))
        cpu.promote(node_BM, count_B, record, path, torch.zeros_like(ids_B), torch.zeros_like(ids_B))
        share_BFK = torch.zeros(rows, topk, topk)
        table_3DR = torch.zeros(3, levels, topk, dtype=torch.float64)
        score_BN = cpu.children(share_BFK, float_B[:, None].expand(rows, topk), 2, table_3DR).flatten(1)
        index_BF = cpu.frontier(score_BN, topk)
        token_BM, parent_BM, *_ = cpu.prune(score_BN.long(), score_BN.long(), score_BN, score_BN, width)
        assert index_BF.shape == (rows, topk) and token_BM.shape == parent_BM.shape == (rows, width)
        with pytest.raises(RuntimeError):
            token_BM.sum().item()


def test_the_host_pads_a_path_as_kernels_do() -> None:
    assert draws.padded(AcceptedPath((0, 2), (4, 5)), 4) == ([0, 2, 2, 3], 2, [4, 5, -1, -1])
