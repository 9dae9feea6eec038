"""Sliding-window attention in every kernel: by position along each path, not by index in the window."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import cpu, flashinfer, reference
from specdec.kernels.attention import triton as attention_triton
from specdec.kernels.attention.quantise import quantise
from specdec.kernels.kv_cache import triton as kv_cache
from specdec.kernels.native import attention as native
from specdec.kernels.native.compiled import compiled
from specdec.kernels.self_attention.layer import AttentionLayer
from tests.kernels.test_attention import (
    BLOCK,
    SCALE,
    Case,
    Heads,
    Tree,
    assert_close,
    copy_of,
    make_case,
    path_to,
    random_tree,
)

WINDOWS = (1, 3, 16, 17, 500)
LENGTHS = ((37,), (0, 130, 16))
SHAPES: dict[str, tuple[int, Tree | None]] = {
    "one": (1, None),
    "chain": (39, None),
    "bush": (23, random_tree(23, 5)),
    "fork": (8, (-1, 0, 1, 2, 0, 4, 5, 6)),
    "deep": (24, (*range(-1, 19), 3, 20, 21, 22)),
}
HEADS = Heads(4, 2, 16, torch.float32)
Form = Callable[[Case, Tensor, int | None], Tensor]


def _plain(case: Case, pages: Tensor, window: int | None) -> Tensor:
    cpu.append(case.k, case.v, pages, case.group)
    return cpu.attend(case.q, pages, case.group, SCALE, window)


def _reference(case: Case, pages: Tensor, window: int | None) -> Tensor:
    reference.append(case.k, case.v, pages, case.group)
    return reference.attend(case.q, pages, case.group, SCALE, window)


def _native(case: Case, pages: Tensor, window: int | None) -> Tensor:
    if pages.dtype != case.q.dtype:
        native.append(case.k, case.v, pages, case.group)
        return native.attend(case.q, pages, case.group, SCALE, window)
    projected_TN = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1)
    layer = layer_of(case, window)
    return native.self_attention(projected_TN, layer, None, pages, case.group).view(case.q.shape)


def _triton(case: Case, pages: Tensor, window: int | None) -> Tensor:
    kv_cache.append(case.k, case.v, pages, case.group)
    return attention_triton.attend(case.q, pages, case.group, SCALE, window)


needs_c = pytest.mark.skipif(not compiled(), reason="no C compiler")
FORMS = [
    pytest.param(_reference, id="reference"),
    pytest.param(_plain, id="cpu"),
    pytest.param(_native, id="native", marks=needs_c),
    pytest.param(_triton, id="triton"),
]
forms = pytest.mark.parametrize("form", FORMS)


def layer_of(case: Case, window: int | None) -> AttentionLayer:
    (_, heads, dim), kv_heads = case.q.shape, case.k.shape[1]
    return AttentionLayer(heads, kv_heads, dim, SCALE, False, None, None, 0.0, window=window)


def by_position(case: Case, tree: Tree | None, window: int) -> Tensor:
    """Attend with a mask as transformers builds it: a key is seen if its position is above p - window."""
    group, out = case.group, torch.empty_like(case.q, dtype=torch.float64)
    for row, length in enumerate(group.length_B.tolist()):
        at = torch.arange(length)
        block_L = group.table_BN[row][at // BLOCK]
        for node in range(group.width):
            path = path_to(tree, node) if tree else list(range(node + 1))
            own = torch.tensor(path) + row * group.width
            committed_LPJD = case.pages[block_L, :, at % BLOCK]
            k_LJD, v_LJD = (
                torch.cat((committed_LPJD[:, i], x[own])).double() for i, x in enumerate((case.k, case.v))
            )
            position_L = torch.cat((at, length + torch.arange(len(path))))
            seen_L = position_L > length + len(path) - 1 - window
            shared = case.q.shape[1] // case.k.shape[1]
            k_LHD, v_LHD = (x[seen_L].repeat_interleave(shared, dim=1) for x in (k_LJD, v_LJD))
            score_LH = torch.einsum("hd,lhd->lh", case.q[own[-1]].double(), k_LHD) * SCALE
            out[own[-1]] = torch.einsum("lh,lhd->hd", score_LH.softmax(0), v_LHD)
    return out


def poisoned(case: Case, window: int) -> Tensor:
    """Copy the pages, with NaN beyond the reach of a row's first query."""
    pages = copy_of(case.pages)
    for row, length in enumerate(case.group.length_B.tolist()):
        for position in range(max(length + 1 - window, 0)):
            pages[case.group.table_BN[row, position // BLOCK], :, position % BLOCK] = torch.nan
    return pages


@forms
@pytest.mark.parametrize("shape", SHAPES)
def test_window_equals_a_mask_by_position(shape: str, form: Form) -> None:
    """Windows shorter than a tree, as long as a block, longer than all; earlier memory is NaN."""
    width, tree = SHAPES[shape]
    for window, lengths in itertools.product(WINDOWS, LENGTHS):
        case = make_case(lengths, width, tree=tree, heads=HEADS)
        found = form(case, poisoned(case, window), window)
        assert_close(found, by_position(case, tree, window).float())


@forms
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_window_that_is_one_off_is_seen(shape: str, wrong: int, form: Form) -> None:
    width, tree = SHAPES[shape]
    case = make_case((40,), width, tree=tree, heads=HEADS)
    found = form(case, copy_of(case.pages), 17 + wrong)
    differs = (found - by_position(case, tree, 17)).abs().amax((1, 2)) > 1e-3
    assert differs.all()


@pytest.mark.parametrize("splits", [2, 5])
def test_parts_of_a_window_are_merged(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of parts, including many beyond the end."""
    monkeypatch.setattr(attention_triton, "LEAST", 1)
    monkeypatch.setattr(attention_triton, "choose_splits", lambda *_: splits)
    for window, shape in ((17, "fork"), (130, "bush"), (200, "chain"), (70, "one")):
        width, tree = SHAPES[shape]
        case = make_case((300, 3), width, tree=tree, heads=HEADS)
        found = _triton(case, poisoned(case, window), window)
        assert_close(found, by_position(case, tree, window).float())


def test_splits_are_those_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def choose(programs: int, longest: int, queries: int, device: torch.device) -> int:
        asked.append(longest)
        return 1

    monkeypatch.setattr(attention_triton, "choose_splits", choose)
    case = make_case((300,), 4, heads=HEADS)
    for window in (None, 17, 1000):
        _triton(case, copy_of(case.pages), window)
    assert asked == [304, 21, 304]


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_before_the_window_are_not_gathered(shape: str) -> None:
    """In plain torch, which would fail on a missing block."""
    width, tree = SHAPES[shape]
    case = make_case((130,), width, tree=tree, heads=HEADS)
    pages, table_BN = copy_of(case.pages), case.group.table_BN.clone()
    table_BN[:, : (130 + 1 - 17) // BLOCK] = len(pages)
    found = _plain(replace(case, group=replace(case.group, table_BN=table_BN)), pages, 17)
    assert torch.equal(found, _plain(case, pages, 17))
    with pytest.raises((IndexError, RuntimeError)):
        _plain(replace(case, group=replace(case.group, table_BN=table_BN)), pages, 40)


@forms
@pytest.mark.parametrize("shape", ["fork", "chain"])
def test_pages_of_8_bits(shape: str, form: Form) -> None:
    width, tree = SHAPES[shape]
    case = make_case((70, 5), width, tree=tree, heads=HEADS)
    narrow = torch.float8_e4m3fn
    k, v, known = (quantise(x, narrow).to(x.dtype) for x in (case.k, case.v, case.pages))
    expected = by_position(replace(case, k=k, v=v, pages=known), tree, 17)
    found = form(case, quantise(poisoned(case, 17), narrow), 17)
    assert_close(found, expected.float())


@needs_c
@pytest.mark.parametrize("shape", SHAPES)
def test_c_gives_a_query_the_same_bits_in_any_window(shape: str) -> None:
    """A node's output equals that at the end of a chain of its path."""
    width, tree = SHAPES[shape]
    case = make_case((37,), width, tree=tree, heads=replace(HEADS, dtype=torch.bfloat16))
    together = _native(case, copy_of(case.pages), 17)
    for node in range(0, width, 5):
        path = path_to(tree, node) if tree else list(range(node + 1))
        pages = copy_of(case.pages)
        before = replace(case.group, width=max(len(path) - 1, 1), ancestors_BMM=None)
        native.append(case.k[path[: before.width]], case.v[path[: before.width]], pages, before)
        length = 37 + len(path) - 1
        group = replace(
            case.group, width=1, ancestors_BMM=None, length_B=torch.tensor([length]), max_length=length
        )
        alone = Case(pages, group, case.q[[node]], case.k[[node]], case.v[[node]])
        assert torch.equal(_native(alone, pages, 17)[0], together[node])


def test_flashinfer_leaves_windows_to_triton() -> None:
    case = make_case((37,), 1, heads=replace(HEADS, dtype=torch.bfloat16))
    group = replace(case.group, record=None)
    assert flashinfer.supports(group, layer_of(case, None), case.pages.contiguous())
    assert not flashinfer.supports(group, layer_of(case, 17), case.pages.contiguous())
