"""Latent attention and products by head: every kernel against the reference, and mutants."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import cpu, reference
from specdec.kernels.attention.quantise import FP8
from specdec.kernels.group import Group
from specdec.kernels.linear import cpu as linear_cpu
from specdec.kernels.linear import reference as linear_reference
from specdec.kernels.native import attention as native
from specdec.kernels.native import linear as linear_native
from specdec.kernels.native.compiled import compiled
from specdec.kernels.self_attention import triton as layer_triton
from specdec.kernels.self_attention.composed import CPU as layer_cpu
from specdec.kernels.self_attention.composed import REFERENCE as layer_reference
from specdec.kernels.self_attention.layer import AttentionLayer, Rotation
from tests.kernels.blocks import LAYERS, OWN, layer_of
from tests.kernels.test_attention import (
    SCALE,
    Case,
    Heads,
    Tree,
    assert_close,
    copy_of,
    make_case,
    random_tree,
)
from tests.kernels.test_attention_triton import GPU

DIMS = ((13, 9, 6, 1), (40, 24, 6, 2), (16, 16, 3, 1), (72, 64, 32, 1))
"""Key dim, value dim, query heads, key heads; values may be whole keys."""
WINDOWS: tuple[tuple[int, Tree | None], ...] = ((1, None), (5, random_tree(5, 2)), (19, None))
NATIVE = pytest.param(native, torch.float32, marks=pytest.mark.skipif(not compiled(), reason="no C compiler"))
FORMS = [(cpu, torch.float64), (cpu, torch.bfloat16), (GPU, torch.float32), (GPU, torch.bfloat16), NATIVE]


def latent(case: Case) -> Case:
    """Drop the separate values."""
    whole = case.pages._base
    assert whole is not None
    keys = whole[:, :, OWN : OWN + 1, :1].expand(-1, -1, LAYERS, -1, -1, -1)
    return replace(case, pages=layer_of(keys.contiguous()))


def quantised(case: Case) -> Case:
    whole = case.pages._base
    assert whole is not None
    return replace(case, pages=layer_of(whole.to(FP8)))


def run(ops: ModuleType, case: Case, value_dim: int) -> Tensor:
    pages = copy_of(case.pages)
    ops.append(case.k, None, pages, case.group)
    out: Tensor = ops.attend(case.q, pages, case.group, SCALE, value_dim=value_dim)
    return out


def as_two(case: Case) -> Case:
    """Store every key twice, the second time as its value."""
    pages = case.pages.expand(-1, 2, *[-1] * 3).contiguous()
    return replace(case, pages=pages, v=case.k)


@pytest.mark.parametrize(("dim", "value_dim", "heads", "kv_heads"), DIMS)
@pytest.mark.parametrize(("width", "tree"), WINDOWS, ids=["decode", "tree", "chunk"])
def test_values_are_where_keys_end(
    width: int, tree: Tree | None, dim: int, value_dim: int, heads: int, kv_heads: int
) -> None:
    """Equal to separate values that are copies of the keys; the mutant uses the start of keys."""
    case = latent(make_case((37, 0), width, tree=tree, heads=Heads(heads, kv_heads, dim)))
    whole_THD = as_two(case).run(reference)
    out = run(reference, case, value_dim)
    assert out.isfinite().all() and out.shape == (2 * width, heads, value_dim)
    assert_close(out, whole_THD[..., dim - value_dim :])
    if dim != value_dim:
        with pytest.raises(AssertionError):
            assert_close(out, whole_THD[..., :value_dim])


@pytest.mark.parametrize(("ops", "dtype"), FORMS)
@pytest.mark.parametrize("narrow", [False, True], ids=["own", "fp8"])
@pytest.mark.parametrize(("dim", "value_dim", "heads", "kv_heads"), DIMS)
def test_form_equals_reference(
    dim: int, value_dim: int, heads: int, kv_heads: int, narrow: bool, ops: ModuleType, dtype: torch.dtype
) -> None:
    """Unwritten pages hold NaN."""
    for width, tree in WINDOWS:
        case = latent(make_case((20, 3), width, tree=tree, heads=Heads(heads, kv_heads, dim, dtype)))
        case = quantised(case) if narrow else case
        assert_close(run(ops, case, value_dim), run(reference, case, value_dim))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_gpu_splits_rows(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of 512, with few queries and keys per program."""
    monkeypatch.setattr("specdec.kernels.attention.triton.LEAST", 1)
    monkeypatch.setattr("specdec.kernels.attention.triton.choose_splits", lambda *_: splits)
    case = latent(make_case((70, 9), 3, tree=(-1, 0, 0), heads=Heads(8, 1, 515, torch.bfloat16)))
    assert_close(run(GPU, case, 512), run(reference, case, 512))


@pytest.mark.parametrize("ops", [cpu, GPU, native], ids=["cpu", "triton", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_append_and_move_touch_no_other_byte(dtype: torch.dtype, ops: ModuleType) -> None:
    for lengths, width in (((0,), 3), ((15, 40), 4), ((14,), 33)):
        own = torch.float32 if dtype == FP8 else dtype
        case = latent(make_case(lengths, width, heads=Heads(4, 3, 21, own)))
        case = quantised(case) if dtype == FP8 else case
        actual, expected = copy_of(case.pages), copy_of(case.pages)
        first = torch.tensor(lengths)[:, None]
        source, target = first + torch.tensor([0, width - 1, 1]), first + torch.tensor([1, 0, width - 1])
        for form, pages in ((ops, actual), (reference, expected)):
            form.append(case.k, None, pages, case.group)
            form.move(pages, case.group.table_BN, source, target)
        assert actual._base is not None and expected._base is not None
        assert torch.equal(actual._base.view(torch.uint8), expected._base.view(torch.uint8))


def make_layer(dtype: torch.dtype, width: int) -> tuple[Tensor, AttentionLayer, Rotation, Tensor, Group]:
    """Draw a layer of 6 query heads and one key head, keys of 40 and values of 24, partly rotated."""
    tree = random_tree(width, 3) if width > 1 else None
    case = latent(make_case((33, 7), width, tree=tree, heads=Heads(6, 1, 40, dtype)))
    layer = AttentionLayer(6, 1, 40, SCALE, False, None, None, 0.0, value_dim=24)
    generator, tokens = torch.Generator().manual_seed(1), 2 * width
    projected_TN = torch.randn(tokens, sum(layer.widths), generator=generator).to(dtype)
    angle_TR = torch.randn(tokens, 8, generator=generator)
    return projected_TN, layer, (angle_TR.cos(), angle_TR.sin()), case.pages, case.group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 5, 33])
@pytest.mark.parametrize("ops", [layer_cpu, layer_triton, native], ids=["cpu", "triton", "native"])
def test_layer_equals_reference(ops: ModuleType, width: int, dtype: torch.dtype) -> None:
    projected_TN, layer, rotation, pages, group = make_layer(dtype, width)
    assert sum(layer.widths) == 7 * 40
    expected_pages = copy_of(pages)
    expected = layer_reference.self_attention(projected_TN, layer, rotation, expected_pages, group)
    out = ops.self_attention(projected_TN, layer, rotation, pages, group)
    assert out.shape == (2 * width, 6 * 24)
    assert_close(out, expected)
    assert_close(pages.nan_to_num(), expected_pages.nan_to_num())


@pytest.mark.skipif(not compiled(), reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_window(dtype: torch.dtype) -> None:
    """For attention and products by head: a text is the same with and without drafts."""
    projected_TN, layer, rotation, pages, group = make_layer(dtype, 33)
    group = replace(group, ancestors_BMM=None)
    wide_pages = copy_of(pages)
    wide = native.self_attention(projected_TN, layer, rotation, wide_pages, group).view(2, 33, -1)
    for m in range(33):
        own = replace(group, width=1, length_B=group.length_B + m, max_length=group.max_length + m)
        token_2 = torch.tensor([m, 33 + m])
        turned = rotation[0][token_2], rotation[1][token_2]
        assert torch.equal(
            native.self_attention(projected_TN[token_2], layer, turned, pages, own), wide[:, m]
        )
    assert torch.equal(pages.nan_to_num(), wide_pages.nan_to_num())
    packed = linear_native.pack_heads(draw(5, 33, 64, dtype=dtype))
    x_THK = draw(17, 5, 64, dtype=dtype)
    all_THN = linear_native.linear_by_head(x_THK, packed)
    for t in range(17):
        assert torch.equal(linear_native.linear_by_head(x_THK[t : t + 1], packed)[0], all_THN[t])


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("ops", [linear_cpu, linear_native], ids=["cpu", "native"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(1, 1, 2), (3, 65, 63), (5, 17, 12), (2, 130, 66)])
def test_each_head_has_its_own_weight(
    heads: int, outputs: int, inputs: int, dtype: torch.dtype, ops: ModuleType
) -> None:
    """Heads are strided, also with odd widths; the mutant swaps two heads."""
    weight_HNK = draw(heads, outputs, inputs, dtype=dtype)
    for tokens in (1, 7, 33):
        x_THK = draw(tokens, heads, inputs + 3, dtype=dtype)[..., 3:]
        expected = linear_reference.linear_by_head(x_THK, linear_reference.pack_heads(weight_HNK))
        assert_close(ops.linear_by_head(x_THK, ops.pack_heads(weight_HNK)), expected)
        if heads > 1:
            swapped = ops.linear_by_head(x_THK, ops.pack_heads(weight_HNK.roll(1, 0)))
            with pytest.raises(AssertionError):
                assert_close(swapped, expected)
