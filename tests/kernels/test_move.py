"""Moving the KV of an accepted path into place."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import cpu, reference
from specdec.kernels.group import Group
from specdec.kernels.native import attention as native
from specdec.kernels.native.compiled import compiled
from tests.kernels.blocks import layer_of, make_blocks
from tests.kernels.trees import Parents, build_group, chain, path_to
from tests.tolerances import KERNEL_FLOAT64

needs_c = pytest.mark.skipif(compiled() is None, reason="no C compiler was found")
BLOCK, LENGTHS = 16, [29, 0, 15]
TREE: Parents = (-1, 0, 0, 1, 2, 4, 5, 2)
NODES = [6, 3, 7]
"""The accepted node of each row: paths 0 2 4 5 6, 0 1 3 and 0 2 7."""


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group_of(trees: list[Parents], lengths: list[int]) -> Group:
    """Build a group whose blocks are out of order, strided as in an arena."""
    table_BN = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4)[: len(trees)]
    base = build_group(trees, list(range(len(trees))))
    return replace(base, table_BN=table_BN, length_B=torch.tensor(lengths), max_length=max(lengths))


def pages_with(lengths: list[int], group: Group) -> Tensor:
    pages_NPXJD = layer_of(make_blocks(12, 2, BLOCK, 2, 5, dtype=torch.float64))
    for b, length in enumerate(lengths):
        for at in range(length):
            pages_NPXJD[group.table_BN[b, at // BLOCK], :, at % BLOCK] = noise(2, 2, 5, seed=100 * b + at)
    return pages_NPXJD


def moves(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return source and target positions of each row's accepted nodes, padded with the root's."""
    paths = [path_to(TREE, node) for node in NODES]
    longest = max(map(len, paths))
    source = [
        [b + node for node in (path + [0] * longest)[:longest]]
        for b, path in zip(lengths, paths, strict=True)
    ]
    target = [
        [b + (i if i < len(path) else 0) for i in range(longest)]
        for b, path in zip(lengths, paths, strict=True)
    ]
    return torch.tensor(source), torch.tensor(target)


@pytest.mark.parametrize("ops", [reference, cpu])
@pytest.mark.parametrize("moved", [True, False], ids=["right", "mutant"])
def test_moving_an_accepted_path_equals_feeding_it(ops: ModuleType, moved: bool) -> None:
    """The path crosses a block boundary in two rows; the mutant omits the move."""
    width = len(TREE)
    group = group_of([TREE] * 3, LENGTHS)
    k_TJD, v_TJD = (noise(3 * width, 2, 5, seed=s) for s in (2, 3))
    pages = pages_with(LENGTHS, group)
    fed = pages.clone()
    ops.append(k_TJD, v_TJD, pages, group)
    if moved:
        ops.move(pages, group.table_BN, *moves(LENGTHS))
    agree = []
    for b, node in enumerate(NODES):
        path = path_to(TREE, node)
        at = [b * width + i for i in path]
        own = replace(group_of([chain(len(path))], [LENGTHS[b]]), table_BN=group.table_BN[b : b + 1])
        ops.append(k_TJD[at], v_TJD[at], fed, own)
        after = LENGTHS[b] + len(path)
        following = replace(own, width=1, length_B=torch.tensor([after]), max_length=after)
        q_THD, new_TJD = noise(1, 4, 5, seed=5), noise(1, 2, 5, seed=6)
        found, expected = pages.clone(), fed.clone()
        ops.append(new_TJD, new_TJD, found, following)
        ops.append(new_TJD, new_TJD, expected, following)
        found_THD, expected_THD = (ops.attend(q_THD, x, following, 0.4) for x in (found, expected))
        agree.append(torch.allclose(found_THD, expected_THD, rtol=KERNEL_FLOAT64, atol=KERNEL_FLOAT64))
    assert agree == [moved] * 3


@pytest.mark.parametrize("ops", [cpu, pytest.param(native, marks=needs_c)])
def test_all_reads_precede_writes_and_other_bytes_stay(ops: ModuleType) -> None:
    """Positions swap and shift onto each other; the kernels agree on every byte."""
    group = group_of([chain(1)] * 3, [40, 40, 40])
    pages = pages_with([40, 40, 40], group)
    source = torch.tensor([[3, 17, 18, 19], [39, 0, 1, 2], [5, 5, 5, 5]])
    target = torch.tensor([[17, 3, 19, 18], [0, 1, 2, 39], [5, 5, 5, 5]])
    before, plain = pages.clone(), pages.clone()
    ops.move(pages, group.table_BN, source, target)
    reference.move(plain, group.table_BN, source, target)
    assert torch.equal(pages.nan_to_num(), plain.nan_to_num())
    changed_NX = (pages.nan_to_num() != before.nan_to_num()).any(1).flatten(2).any(2)
    assert int(changed_NX.sum()) == 8
    table_N = group.table_BN[1]
    assert torch.equal(pages[table_N[0], :, 1], before[table_N[0], :, 0])
