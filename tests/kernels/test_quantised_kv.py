"""8-bit KV: a token's values are the same in the window that writes them and in later ones."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import cpu, reference
from specdec.kernels.attention.quantise import FP8, LARGEST, quantise
from specdec.kernels.native import attention as native
from specdec.kernels.self_attention import triton as layer_triton
from specdec.kernels.self_attention.composed import CPU as layer_cpu
from specdec.kernels.self_attention.composed import REFERENCE as layer_reference
from specdec.kernels.self_attention.layer import AttentionLayer
from tests.kernels.blocks import layer_of
from tests.kernels.test_attention import (
    SCALE,
    Case,
    Heads,
    Tree,
    assert_close,
    make_case,
    path_to,
    random_tree,
)
from tests.kernels.test_attention_triton import GPU
from tests.tolerances import BFLOAT16_EQUAL, KERNEL

TREE: Tree = (-1, 0, 0, 1, 2, 2, 4)
FORMS = [(reference, torch.float64), (cpu, torch.float64), (cpu, torch.bfloat16), (GPU, torch.float32)]
forms = pytest.mark.parametrize(
    ("ops", "dtype"), FORMS, ids=[f"{ops.__name__.rpartition('.')[2]}-{dtype}" for ops, dtype in FORMS]
)


def quantised(case: Case) -> Case:
    """Store committed KV in 8 bits; some of the window's keys exceed the range."""
    case.k[0, 0, 0], case.k[1, 0, 1], case.v[0, 0, 0] = 500.0, -1e4, 470.0
    whole = case.pages._base
    assert whole is not None
    return replace(case, pages=layer_of(whole.clamp(-LARGEST, LARGEST).to(FP8)))


def make(lengths: tuple[int, ...], tree: Tree | None, dtype: torch.dtype, width: int = len(TREE)) -> Case:
    return quantised(make_case(lengths, width, tree=tree, heads=Heads(4, 2, 16, dtype)))


def test_rounding_is_to_the_nearest_and_ends_at_the_largest() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    known = every[~every.isnan()].sort().values
    x = torch.cat(
        (torch.randn(2000, dtype=torch.float64) * 50, known, torch.tensor([447.0, 1e9, -1e9, 1e-9]))
    )
    nearest = known[(x[:, None] - known).abs().argmin(1)]
    # Halfway between two numbers either is the nearest.
    far = (quantise(x, FP8).double() - x).abs() - (nearest - x).abs()
    assert far.abs().max() == 0
    assert quantise(torch.tensor([torch.inf, -torch.inf]), FP8).float().tolist() == [LARGEST, -LARGEST]
    assert quantise(torch.tensor([torch.nan]), FP8).float().isnan().all()
    assert quantise(x, torch.float64) is x


@forms
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_form_equals_reference(tree: Tree | None, ops: ModuleType, dtype: torch.dtype) -> None:
    case = make((20, 3), tree, dtype)
    written, expected = case.pages.clone(), case.pages.clone()
    ops.append(case.k, case.v, written, case.group)
    reference.append(case.k, case.v, expected, case.group)
    assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
    out = ops.attend(case.q, written, case.group, SCALE)
    assert_close(out, reference.attend(case.q, expected, case.group, SCALE))
    # The values read are the stored ones, which have 8 bits.
    wide = replace(case, pages=expected.to(dtype))
    assert_close(out, reference.attend(case.q, wide.pages, case.group, SCALE))


@forms
@pytest.mark.parametrize("kept", [True, False], ids=["right", "mutant"])
def test_window_equals_its_tokens_one_by_one(ops: ModuleType, dtype: torch.dtype, kept: bool) -> None:
    """The mutant attends to the window's own keys before their rounding."""
    case = make((20,), TREE, dtype)
    written = case if kept else replace(case, pages=case.pages.to(dtype))
    out = run(ops, written)
    agree = []
    for node in range(len(TREE)):
        path, pages = path_to(TREE, node), case.pages.clone()
        for depth, at in enumerate(path):
            group = replace(
                case.group,
                width=1,
                ancestors_BMM=None,
                length_B=torch.tensor([20 + depth]),
                max_length=20 + depth,
            )
            one = Case(pages, group, case.q[[at]], case.k[[at]], case.v[[at]])
            ops.append(one.k, one.v, pages, group)
            last = ops.attend(one.q, pages, group, SCALE)[0]
        agree.append(torch.allclose(out[node], last, rtol=KERNEL[dtype], atol=KERNEL[dtype]))
    assert all(agree) == kept


def run(ops: ModuleType, case: Case) -> Tensor:
    pages = case.pages.clone()
    ops.append(case.k, case.v, pages, case.group)
    out: Tensor = ops.attend(case.q, pages, case.group, SCALE)
    return out


@pytest.mark.parametrize("ops", [layer_cpu, native, layer_triton], ids=["cpu", "native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_equals_reference(dtype: torch.dtype, ops: ModuleType) -> None:
    """Narrow enough for the C kernel, which leaves 8-bit pages to torch."""
    tree = random_tree(5, 4)
    case = make((20, 3), tree, dtype, width=5)
    layer = AttentionLayer(4, 2, 16, SCALE, True, torch.full((16,), 9.0), torch.full((16,), 90.0), 1e-6)
    projected = torch.randn(10, sum(layer.widths), generator=torch.Generator().manual_seed(0)).to(dtype)
    angle = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.1])
    rotation = (angle.cos(), angle.sin())
    pages, expected_pages = case.pages.clone(), case.pages.clone()
    out = ops.self_attention(projected, layer, rotation, pages, case.group)
    expected = layer_reference.self_attention(projected, layer, rotation, expected_pages, case.group)
    same = pages.view(torch.uint8) == expected_pages.view(torch.uint8)
    assert same.float().mean() >= BFLOAT16_EQUAL
    if same.all():
        assert_close(out, expected)


def test_moving_keeps_every_bit() -> None:
    case = make((20,), TREE, torch.float32)
    pages = [case.pages.clone() for _ in range(3)]
    for ops, own in zip((reference, cpu, GPU), pages, strict=True):
        reference.append(case.k, case.v, own, case.group)
        ops.move(own, case.group.table_BN, torch.tensor([[20, 22, 24, 26]]), torch.tensor([[20, 21, 22, 23]]))
    assert all(torch.equal(page.view(torch.uint8), pages[0].view(torch.uint8)) for page in pages)
