"""The GPU's attention, in Triton's interpreter, against the reference and along tree paths."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.kernels.attention import cpu, reference, triton
from specdec.kernels.group import Group
from specdec.kernels.kv_cache import triton as kv_cache
from specdec.kernels.self_attention import triton as layer_triton
from specdec.kernels.self_attention.composed import REFERENCE as layer_reference
from specdec.kernels.self_attention.layer import AttentionLayer
from tests.kernels.test_attention import (
    SCALE,
    Case,
    Heads,
    assert_close,
    copy_of,
    make_case,
    path_to,
    random_tree,
)
from tests.tolerances import BFLOAT16_EQUAL

GPU = ModuleType("triton")
vars(GPU).update(append=kv_cache.append, attend=triton.attend, move=kv_cache.move)
"""The operations as grouped in `cpu` and `reference`."""
NARROW = Heads(4, 2, 16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Splitter = Callable[[int], None]


class Recorder(TorchDispatchMode):
    """Record the names of all torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Splitter:
    """Return a function that sets the number of parts a row is split into."""

    def settle(count: int) -> None:
        monkeypatch.setattr(triton, "LEAST", 1)
        monkeypatch.setattr(triton, "choose_splits", lambda *_: count)

    return settle


@pytest.mark.parametrize(
    ("dtype", "splits"), [(torch.bfloat16, 1), (torch.float32, 2), (torch.bfloat16, 5)], ids=str
)
@pytest.mark.parametrize("lengths", [(0, 200, 16), (17, 1, 15)], ids=str)
@pytest.mark.parametrize(("width", "kind"), [(1, "chain"), (4, "tree"), (8, "tree"), (17, "chain")])
def test_window_equals_reference(
    width: int, kind: str, lengths: tuple[int, ...], splits: int, dtype: torch.dtype, split: Splitter
) -> None:
    split(splits)
    tree = random_tree(width, width) if kind == "tree" else None
    case = make_case(lengths, width, tree=tree, heads=replace(NARROW, dtype=dtype))
    assert_close(case.run(GPU), case.run(reference))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_widest_window_equals_reference(kind: str, splits: int, split: Splitter) -> None:
    """More queries than one program takes, and every bit of the mask."""
    split(splits)
    tree = random_tree(64, 3) if kind == "tree" else None
    case = make_case((30,), 64, tree=tree, heads=Heads(4, 1, 16, torch.bfloat16))
    assert_close(case.run(GPU), case.run(reference))


@dtypes
def test_prompt_equals_cpu(dtype: torch.dtype) -> None:
    """A chunk of several programs' queries after committed tokens."""
    case = make_case((70,), 150, heads=Heads(4, 2, 16, dtype))
    assert_close(case.run(GPU), case.run(cpu))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (6, 1), (15, 3), (12, 2)])
@pytest.mark.parametrize("dim", [8, 63, 80])
def test_head_ratios_equal_reference(dim: int, queries: int, keys: int, split: Splitter) -> None:
    split(2)
    case = make_case((33, 66), 3, tree=(-1, 0, 0), heads=Heads(queries, keys, dim, torch.float32))
    assert_close(case.run(GPU), case.run(reference))


def test_wide_heads_equal_reference(split: Splitter) -> None:
    split(3)
    case = make_case((70,), 3, tree=(-1, 0, 0), heads=Heads(16, 2, 256, torch.bfloat16))
    assert_close(case.run(GPU), case.run(reference))


@pytest.mark.parametrize(("length", "width"), [(0, 9), (33, 16)])
def test_node_equals_its_path_as_a_chain(length: int, width: int) -> None:
    tree = random_tree(width, 1)
    case = make_case((length,), width, tree=tree, heads=NARROW)
    out = case.run(GPU)
    for node in range(1, width, 3):
        path = path_to(tree, node)
        group = replace(case.group, width=len(path), ancestors_BMM=None)
        along = Case(case.pages, group, case.q[path], case.k[path], case.v[path])
        assert_close(out[node], along.run(GPU)[-1])


def test_one_wrong_bit_of_the_mask_is_seen() -> None:
    """Hiding or exposing one node, including the last of 64, changes only the node with the wrong bit."""
    width, tree = 64, random_tree(64, 2)
    case = make_case((20,), width, tree=tree, heads=Heads(1, 1, 16, torch.float32))
    right = case.run(GPU)
    assert case.group.ancestors_BMM is not None
    for node, other in ((0, 0), (5, 63), (31, 32), (63, 63), (63, 0)):
        seen_BMM = case.group.ancestors_BMM.clone()
        seen_BMM[0, node, other] ^= True
        wrong = replace(case, group=replace(case.group, ancestors_BMM=seen_BMM)).run(GPU)
        differs = (wrong - right).abs().amax((1, 2)) > 1e-3
        assert differs.nonzero().flatten().tolist() == [node]


def test_rows_are_blind_to_each_other_and_to_padding() -> None:
    """Padding rows use the dummy block: they may write there, and must not affect other rows."""
    case = make_case((40, 7), 3, heads=NARROW)
    dummy = min(set(range(len(case.pages))) - set(case.group.table_BN.flatten().tolist()))
    table_BN = torch.cat((case.group.table_BN, torch.full((2, case.group.table_BN.shape[1]), dummy)))
    padded = replace(
        case,
        group=replace(case.group, rows=4, table_BN=table_BN, length_B=torch.tensor([40, 7, 0, 0])),
        **{name: torch.cat((own := getattr(case, name), own)) for name in "qkv"},
    )
    out = padded.run(GPU)
    assert torch.equal(out[:6], case.run(GPU)) and not out.isnan().any()


def test_a_bound_may_far_exceed_the_lengths(split: Splitter) -> None:
    """As in a captured step: the number of splits follows the bound, and most have no work."""
    split(5)
    case = make_case((3, 70), 4, tree=(-1, 0, 0, 1), heads=NARROW)
    table_BN = torch.cat((case.group.table_BN, torch.full((2, 60), len(case.pages) - 1)), dim=1)
    bound = replace(case, group=replace(case.group, table_BN=table_BN, max_length=1000))
    assert_close(bound.run(GPU), case.run(reference))


@pytest.mark.parametrize(
    ("programs", "longest", "expected"),
    [(1, 100_000, 128), (1, 40, 1), (1, 1000, 7), (64, 10_000, 5), (600, 10_000, 1)],
)
def test_splits_keep_a_gpu_busy_and_are_worth_merging(programs: int, longest: int, expected: int) -> None:
    assert triton.choose_splits(programs, longest, 16, torch.device("cpu")) == expected


@dtypes
@pytest.mark.parametrize(("lengths", "width"), [((0,), 1), ((15, 40), 3), ((14,), 33)])
def test_append_and_move_equal_reference(lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    """Compares every byte: other rows' and layers' memory must not change."""
    case = make_case(lengths, width, heads=Heads(4, 3, 63, dtype))
    actual, expected = copy_of(case.pages), copy_of(case.pages)
    first = torch.tensor(lengths)[:, None]
    source, target = first + torch.tensor([0, width - 1, 0]), first + torch.tensor([width // 2, 0, width - 1])
    for ops, pages in ((GPU, actual), (reference, expected)):
        ops.append(case.k, case.v, pages, case.group)
        ops.move(pages, case.group.table_BN, source, target)
    for a, e in ((actual, expected), (actual._base, expected._base)):
        assert a is not None and e is not None
        assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))


NORMS = {"none": None, "own": torch.bfloat16, "wide": torch.float32}


@pytest.mark.parametrize(
    ("gated", "rotated", "wide"), [(True, 8, False), (False, 16, False), (True, 0, False), (False, 8, True)]
)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_equals_reference(
    dtype: torch.dtype, gated: bool, norm: str, rotated: int, wide: bool, split: Splitter
) -> None:
    """In bfloat16 the pages equal the reference's, except for sums rounded in another order."""
    split(1 + rotated // 8)
    projected, layer, rotation, pages, group = make_layer(
        dtype, gated=gated, norm=NORMS[norm], rotated=rotated, lengths=(70, 5), tree=(-1, 0, 0, 1)
    )
    layer = replace(layer, wide_rotation=wide)
    expected_pages = copy_of(pages)
    expected = layer_reference.self_attention(projected, layer, rotation, expected_pages, group)
    out = layer_triton.self_attention(projected, layer, rotation, pages, group)
    assert_close(out, expected)
    own, theirs = (p[~p.isnan()] for p in (pages, expected_pages))
    assert_close(own, theirs)
    if dtype == torch.bfloat16:
        assert (own == theirs).float().mean() >= (BFLOAT16_EQUAL if norm != "none" else 1)


def make_layer(
    dtype: torch.dtype,
    *,
    gated: bool,
    norm: torch.dtype | None,
    rotated: int,
    lengths: Sequence[int],
    tree: Sequence[int],
    dim: int = 24,
) -> tuple[Tensor, AttentionLayer, tuple[Tensor, Tensor] | None, Tensor, Group]:
    """Draw a layer with 6 query and 2 key heads, and its input; unwritten memory is NaN."""
    heads = Heads(6, 2, dim, dtype)
    case = make_case(lengths, len(tree), tree=tuple(tree), heads=heads)
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights = [noise(dim).to(norm) if norm else None for _ in range(2)]
    layer = AttentionLayer(6, 2, dim, SCALE, gated, *weights, eps=1e-6)
    tokens = len(lengths) * len(tree)
    angle = noise(tokens, rotated // 2) if rotated else None
    rotation = None if angle is None else (angle.cos(), angle.sin())
    projected = noise(tokens, sum(layer.widths)).to(dtype)
    return projected, layer, rotation, case.pages, case.group


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_is_read_back_from_the_device(splits: int, split: Splitter) -> None:
    """A captured step has no operation that waits for the device, or whose result's size depends on data."""
    split(splits)
    projected, layer, rotation, pages, group = make_layer(
        torch.bfloat16, gated=True, norm=torch.float32, rotated=8, lengths=(40, 5), tree=(-1, 0, 0, 1)
    )
    with Recorder() as seen:
        layer_triton.self_attention(projected, layer, rotation, pages, group)
        GPU.move(pages, group.table_BN, torch.tensor([[40, 42], [5, 7]]), torch.tensor([[40, 41], [5, 6]]))
    assert "empty" in seen.names
    assert not seen.names & {"_local_scalar_dense", "nonzero", "index", "index_put_", "masked_select"}
