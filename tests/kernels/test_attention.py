"""Paged attention against its reference, along paths, ignoring everything a node must not see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.attention import cpu, reference
from specdec.kernels.group import Group
from specdec.kernels.native import attention as native
from specdec.kernels.native.compiled import compiled
from tests.kernels.blocks import layer_of, make_blocks
from tests.tolerances import KERNEL

BLOCK = 16
SCALE = 0.3
Tree = tuple[int, ...]
"""The parent of each node, -1 for the root's."""
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Heads:
    """H query heads share J key heads of D entries."""

    queries: int = 4
    keys: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Case:
    """Pages with every row's history, NaN elsewhere, and the next window."""

    pages: Tensor
    group: Group
    q: Tensor
    k: Tensor
    v: Tensor

    def run(self, ops: ModuleType) -> Tensor:
        """Append the window and attend, on a copy of the pages."""
        pages = copy_of(self.pages)
        ops.append(self.k, self.v, pages, self.group)
        return ops.attend(self.q, pages, self.group, SCALE)


def chain(width: int) -> Tree:
    return tuple(range(-1, width - 1))


def random_tree(width: int, seed: int) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return (-1, *[int(torch.randint(max(0, i - 5), i, (), generator=generator)) for i in range(1, width)])


def path_to(tree: Tree, node: int) -> list[int]:
    return [*(path_to(tree, tree[node]) if tree[node] >= 0 else []), node]


def build_group(
    lengths: Sequence[int], tree: Tree | None, width: int, table: Sequence[Sequence[int]]
) -> Group:
    """Build a group of rows whose windows have the same tree, or are chains for None."""
    ancestors = None
    if tree is not None:
        seen = [[j in path_to(tree, i) for j in range(width)] for i in range(width)]
        ancestors = torch.tensor(seen).repeat(len(lengths), 1, 1)
    return Group(
        start=0,
        rows=len(lengths),
        width=width,
        state_B=torch.arange(len(lengths)),
        path=None,
        path_length_B=None,
        record=None,
        snapshot_BM=None,
        ancestors_BMM=ancestors,
        tap_BMC=None,
        table_BN=torch.tensor(table),
        length_B=torch.tensor(lengths),
        max_length=max(lengths),
    )


def make_pages(num_blocks: int, heads: Heads) -> Tensor:
    """Make one layer's pages between those of others, all NaN."""
    return layer_of(make_blocks(num_blocks, 2, BLOCK, heads.keys, heads.dim, dtype=heads.dtype))


def copy_of(pages: Tensor) -> Tensor:
    """Copy the pages, including gaps and strides."""
    whole = pages.as_strided((pages.untyped_storage().nbytes() // pages.element_size(),), (1,), 0)
    return whole.clone().as_strided(pages.shape, pages.stride(), pages.storage_offset())


def make_case(
    lengths: Sequence[int], width: int, *, tree: Tree | None = None, heads: Heads | None = None, seed: int = 0
) -> Case:
    heads = heads or Heads()
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(heads.dtype)

    rows = len(lengths)
    per_row = -(-(max(lengths) + width) // BLOCK)
    free = torch.randperm(rows * per_row + 3, generator=generator).tolist()
    table = [free[row * per_row : (row + 1) * per_row] for row in range(rows)]
    for row, length in enumerate(lengths):
        # Padding may name any block: here one that no row owns.
        needed = -(-(length + width) // BLOCK)
        table[row][needed:] = [free[-1]] * (per_row - needed)
    pages = make_pages(len(free), heads)
    for row, length in enumerate(lengths):
        for position in range(length):
            page = pages[table[row][position // BLOCK]]
            page[:, position % BLOCK] = noise(2, heads.keys, heads.dim)
    tokens = rows * width
    q, k, v = (noise(tokens, count, heads.dim) for count in (heads.queries, heads.keys, heads.keys))
    return Case(pages, build_group(lengths, tree, width, table), q, k, v)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = KERNEL[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


LENGTHS = {"alone": (63,), "new": (0,), "rows": (1, 65, 16), "new rows": (0, 0), "short": (15,)}


@dtypes
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("width", [1, 2, 16, 17, 33, 65])
def test_chain_equals_reference(width: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make_case(lengths, width, heads=Heads(dtype=dtype))
    assert_close(case.run(cpu), case.run(reference))


@dtypes
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("width", [1, 5, 31, 64])
def test_tree_equals_reference(width: int, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make_case(lengths, width, tree=random_tree(width, width), heads=Heads(dtype=dtype))
    assert_close(case.run(cpu), case.run(reference))


@dtypes
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (6, 3), (4, 1), (15, 3)])
@pytest.mark.parametrize("dim", [1, 63, 65])
def test_head_ratios_equal_reference(dim: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    heads = Heads(queries, keys, dim, dtype)
    for width, tree in ((1, None), (7, None), (7, random_tree(7, 0)), (70, None)):
        case = make_case((33, 2), width, tree=tree, heads=heads)
        assert_close(case.run(cpu), case.run(reference))


@pytest.mark.parametrize(("length", "width"), [(0, 257), (65, 300)])
def test_long_chunk_equals_reference(length: int, width: int) -> None:
    """Longer than the part of a chunk that shares a mask."""
    case = make_case((length,), width, heads=Heads(2, 1, 4, torch.float32))
    assert_close(case.run(cpu), case.run(reference))


def test_queries_may_be_strided() -> None:
    case = make_case((33, 2), 3)
    padded = torch.cat((case.q, torch.full_like(case.q, torch.nan)), dim=-1)
    strided = replace(case, q=padded[..., : case.q.shape[-1]])
    assert torch.equal(strided.run(cpu), case.run(cpu))


@dtypes
@pytest.mark.parametrize(
    ("lengths", "width"),
    [((0,), 1), ((15,), 2), ((47,), 32), ((14,), 33), ((7,), 513), ((0, 63, 16), 1), ((3, 40), 65)],
)
def test_append_equals_reference(lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    """Compares every byte: other rows' and layers' memory must not change."""
    case = make_case(lengths, width, heads=Heads(dtype=dtype))
    actual, expected = copy_of(case.pages), copy_of(case.pages)
    cpu.append(case.k, case.v, actual, case.group)
    reference.append(case.k, case.v, expected, case.group)
    assert not actual.isnan().all()
    for a, e in ((actual, expected), (actual._base, expected._base)):
        assert a is not None
        torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ops", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize(("length", "width"), [(0, 9), (33, 16)])
def test_node_equals_its_path_as_a_chain(length: int, width: int, ops: ModuleType) -> None:
    tree = random_tree(width, 1)
    case = make_case((length,), width, tree=tree)
    out = case.run(ops)
    for node in range(width):
        path = path_to(tree, node)
        group = replace(case.group, width=len(path), ancestors_BMM=None)
        along = Case(case.pages, group, case.q[path], case.k[path], case.v[path])
        assert_close(out[node], along.run(ops)[-1])


@pytest.mark.parametrize("length", [0, 33])
def test_permuted_siblings_permute_the_outputs(length: int) -> None:
    tree: Tree = (-1, 0, 0, 0, 1, 2, 2, 3)
    order = [0, 3, 1, 2, 6, 7, 5, 4]
    renamed: Tree = tuple(-1 if tree[old] < 0 else order.index(tree[old]) for old in order)
    case = make_case((length,), len(tree), tree=tree)
    group = build_group((length,), renamed, len(tree), case.group.table_BN.tolist())
    permuted = Case(case.pages, group, case.q[order], case.k[order], case.v[order])
    assert_close(permuted.run(cpu), case.run(cpu)[order])


def test_rows_equal_the_same_rows_alone() -> None:
    case = make_case((40, 3, 70), 5, tree=random_tree(5, 2), heads=Heads(dtype=torch.float32))
    together = case.run(cpu).view(3, 5, 4, 8)
    for row, length in enumerate(case.group.length_B.tolist()):
        tokens = slice(row * 5, row * 5 + 5)
        assert case.group.ancestors_BMM is not None
        group = replace(
            case.group,
            rows=1,
            table_BN=case.group.table_BN[row : row + 1],
            ancestors_BMM=case.group.ancestors_BMM[row : row + 1],
            length_B=case.group.length_B[row : row + 1],
            max_length=length,
        )
        alone = Case(case.pages, group, case.q[tokens], case.k[tokens], case.v[tokens])
        assert torch.equal(alone.run(cpu), together[row])


def test_shared_blocks_serve_several_rows() -> None:
    """Three rows share their first two blocks and continue in their own."""
    case = make_case((37, 37, 37), 4)
    table = case.group.table_BN.clone()
    table[:, :2] = table[0, :2]
    shared = replace(case, group=replace(case.group, table_BN=table))
    out = shared.run(cpu)
    assert_close(out, shared.run(reference))
    assert not torch.allclose(out, case.run(cpu))
    pages = copy_of(case.pages)
    cpu.append(case.k, case.v, pages, shared.group)
    assert torch.equal(pages[table[0, :2]], case.pages[table[0, :2]])


@pytest.mark.parametrize("tree", [None, random_tree(6, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [(21,), (21, 3, 64)])
def test_invalid_entries_change_nothing(lengths: tuple[int, ...], tree: Tree | None) -> None:
    for width in (1, 6):
        case = make_case(lengths, width, tree=tree if width == 6 else None)
        expected = case.run(cpu)
        assert expected.isfinite().all()
        for garbage in (0.0, 1e30, torch.inf):
            other = replace(case, pages=torch.where(case.pages.isnan(), garbage, case.pages))
            assert torch.equal(other.run(cpu), expected)


class Sizes(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_chunk_never_holds_all_scores(dtype: torch.dtype) -> None:
    heads, width, length = Heads(8, 2, 8, dtype), 512, 1024
    case = make_case((length,), width, heads=heads)
    bound = cpu.QUERIES * (length + width)
    with Sizes() as sizes:
        cpu.attend(case.q, case.pages, case.group, SCALE)
    assert 0 < sizes.largest <= bound
    with sdpa_kernel(SDPBackend.MATH), Sizes() as sizes:
        cpu.attend(case.q, case.pages, case.group, SCALE)
    assert sizes.largest > bound


def _wrong_ancestor(case: Case) -> Case:
    assert case.group.ancestors_BMM is not None
    ancestors = case.group.ancestors_BMM.clone()
    node = next(i for i in range(1, ancestors.shape[1]) if not ancestors[0, i, 1:i].all())
    other = next(j for j in range(1, node) if not ancestors[0, node, j])
    ancestors[0, node, other] = True
    return replace(case, group=replace(case.group, ancestors_BMM=ancestors))


def _missing_ancestor(case: Case) -> Case:
    assert case.group.ancestors_BMM is not None
    ancestors = case.group.ancestors_BMM.clone()
    ancestors[-1, -1, 0] = False
    return replace(case, group=replace(case.group, ancestors_BMM=ancestors))


def _wrong_block(case: Case) -> Case:
    table = case.group.table_BN.clone()
    table[-1, 0] = table[-1, 1]
    return replace(case, group=replace(case.group, table_BN=table))


@pytest.mark.parametrize("mutate", [_wrong_ancestor, _missing_ancestor, _wrong_block])
@pytest.mark.parametrize("lengths", [(37,), (37, 20)])
def test_mutant_is_seen(mutate: Callable[[Case], Case], lengths: tuple[int, ...]) -> None:
    case = make_case(lengths, 9, tree=random_tree(9, 4))
    expected = case.run(reference)
    assert_close(case.run(cpu), expected)
    with pytest.raises(AssertionError):
        assert_close(mutate(case).run(cpu), expected)


@pytest.mark.parametrize("garbage", [torch.nan, 0.5], ids=["NaN", "a number"])
def test_leaked_invalid_position_is_seen(garbage: float) -> None:
    """An implementation that reads one position beyond the row's last must fail, whatever is stored there."""
    case = make_case((37,), 1)
    case = replace(case, pages=torch.where(case.pages.isnan(), garbage, case.pages))
    pages = copy_of(case.pages)
    cpu.append(case.k, case.v, pages, case.group)
    expected = reference.attend(case.q, pages, case.group, SCALE)
    assert_close(cpu.attend(case.q, pages, case.group, SCALE), expected)
    longer = replace(case.group, length_B=case.group.length_B + 1)
    with pytest.raises(AssertionError):
        assert_close(cpu.attend(case.q, pages, longer, SCALE), expected)


@dtypes
def test_a_gate_for_each_head_equals_reference(dtype: torch.dtype) -> None:
    """In C a head's bits do not depend on other heads."""
    x_THW, gates_TN = torch.randn(7, 3, 5).to(dtype), 4 * torch.randn(7, 9).to(dtype)
    gate_TH = gates_TN[:, 6:]
    expected_THW = reference.gate_heads(x_THW, gate_TH)
    assert not torch.allclose(expected_THW, x_THW)
    for ops in (cpu, native) if compiled() else (cpu,):
        found_THW = ops.gate_heads(x_THW, gate_TH)
        torch.testing.assert_close(found_THW, expected_THW, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    apart = [ops.gate_heads(x_THW[t : t + 1], gate_TH[t : t + 1]) for t in range(7)]
    assert dtype == torch.float64 or torch.equal(torch.cat(apart), found_THW)
