"""The arguments passed to FlashInfer, against a fake that follows its documentation."""

import sys
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from specdec.core.device.graph_key import GraphKey
from specdec.kernels.attention import flashinfer, reference
from specdec.kernels.attention.quantise import FP8
from specdec.kernels.group import Group
from specdec.kernels.self_attention import flashinfer as layer_flashinfer
from specdec.kernels.self_attention.composed import REFERENCE as layer_reference
from specdec.kernels.self_attention.layer import AttentionLayer
from specdec.models.shapes import SHAPES
from specdec.setup.build import LoadedModel
from specdec.setup.precompile import precompile
from specdec.setup.settings import Resolved
from tests.core.device import without_host
from tests.kernels.test_attention import SCALE, Heads, assert_close, copy_of, make_case, random_tree
from tests.kernels.test_attention_triton import make_layer

Scratches = dict[int, list[tuple[Tensor, Tensor]]]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not made for the interpreter")


def stand_in(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, output: Tensor,
    workspace_buffer: Tensor, semaphores: Tensor, num_kv_heads: int, page_size: int, *, q_scale: float,
    q_seq_len: int, mask: Tensor | None, enable_pdl: bool,
) -> None:  # fmt: skip
    """Attend row by row; bit j of a node's words: it sees the j-th of the last `q_seq_len` tokens."""
    rows, _, *window, heads, dim = q.shape
    assert window == ([] if q_seq_len == 1 else [q_seq_len]) and q.is_contiguous() and output.is_contiguous()
    assert q.dtype == k_cache.dtype == v_cache.dtype == output.dtype
    assert (page_table.dtype, seq_lens.dtype) == (torch.int32, torch.uint32) and seq_lens.shape == (rows, 1)
    assert k_cache.shape[1:] == (page_size, num_kv_heads, dim)
    assert all(stride % dim == 0 for stride in k_cache.stride()[:3])
    assert workspace_buffer.dtype == torch.uint8 and not semaphores.view(torch.int32).any()
    words = (q_seq_len + 31) // 32 * 2
    assert (mask is None) == (q_seq_len == 1) and (mask is None or mask.dtype == torch.uint16)
    assert mask is None or mask.shape == (rows, q_seq_len, words)
    q_BMHD, out_BMHD = (x.view(rows, q_seq_len, heads, dim) for x in (q, output))
    for row in range(rows):
        length = int(seq_lens[row, 0].item())
        at = torch.arange(length)
        block = page_table[row].long()[at // page_size]
        k_LHD, v_LHD = (
            x[block, at % page_size].float().repeat_interleave(heads // num_kv_heads, dim=1)
            for x in (k_cache, v_cache)
        )
        for node in range(q_seq_len):
            seen = [True] * length
            for other in range(q_seq_len) if mask is not None else ():
                word = int(mask.view(torch.int16)[row, node, other // 16].item())
                seen[length - q_seq_len + other] = bool(word >> other % 16 & 1)
            score_HL = torch.einsum("hd,lhd->hl", q_BMHD[row, node].float(), k_LHD) * q_scale / dim**0.5
            weight_HL = score_HL.masked_fill(~torch.tensor(seen), -torch.inf).softmax(-1)
            out_BMHD[row, node] = torch.einsum("hl,lhd->hd", weight_HL, v_LHD).to(q.dtype)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(xqa=stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(xqa=module))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    monkeypatch.setattr(flashinfer, "SCRATCH", 16)


def tentative(group: Group) -> Group:
    """Make a group's windows drafts, by giving them snapshot slots."""
    return replace(group, snapshot_BM=torch.zeros(group.rows, group.width, dtype=torch.int64))


def group_of(
    width: int, *, tree: bool, dtype: torch.dtype = torch.bfloat16, dim: int = 16
) -> tuple[Group, Tensor]:
    tree_ = random_tree(width, width) if tree else None
    case = make_case((20, 0, 3), width, tree=tree_, heads=Heads(4, 2, dim, dtype))
    return case.group, case.pages


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("width", [1, 4, 31, 32, 33, 64])
def test_packed_masks_equal_the_ancestors_of_the_group(width: int, tree: bool) -> None:
    group, _ = group_of(width, tree=tree)
    table_BN, length_B, mask_BMW = flashinfer.pack(group)
    assert table_BN.tolist() == group.table_BN.tolist()
    assert length_B.tolist() == [int(length) + width for length in group.length_B]
    seen_BMM = torch.ones(width, width).tril().bool().expand(3, -1, -1)
    if group.ancestors_BMM is not None:
        seen_BMM = group.ancestors_BMM
    for row in range(3):
        for node in range(width):
            found = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(mask_BMW[row, node]))
            assert found == sum(1 << j for j in range(width) if seen_BMM[row, node, j])


@pytest.mark.parametrize(("width", "tree"), [(1, False), (4, True), (5, False), (33, True)])
def test_attending_equals_reference(width: int, tree: bool) -> None:
    heads = Heads(6, 2, 16, torch.bfloat16)
    case = make_case((0, 40), width, tree=random_tree(width, 1) if tree else None, heads=heads)
    reference.append(case.k, case.v, case.pages, case.group)
    expected = reference.attend(case.q, case.pages, case.group, SCALE)
    scratch = flashinfer.Scratch.on(torch.device("cpu"))
    assert_close(flashinfer.attend(case.q, case.pages, case.group, SCALE, scratch), expected)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_layer_equals_reference(gated: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    layer_flashinfer._log_choice.cache_clear()
    projected, layer, rotation, pages, group = make_layer(
        torch.bfloat16,
        gated=gated,
        norm=torch.float32,
        rotated=8,
        lengths=(40, 5),
        tree=(-1, 0, 0, 1),
        dim=32,
    )
    group, attention = tentative(group), layer_flashinfer.FlashInferAttention()
    expected_pages = copy_of(pages)
    expected = layer_reference.self_attention(projected, layer, rotation, expected_pages, group)
    for _ in range(2):
        out = attention.self_attention(projected, layer, rotation, pages, group)
        assert_close(out, expected)
    assert [record.getMessage() for record in caplog.records] == [
        "attention of 6 over 2 heads of 32, torch.bfloat16, window 4: FlashInfer's XQA"
    ]


def test_unsupported_shapes_fall_back_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = AttentionLayer(4, 2, 16, SCALE, False, None, None, 0.0)
    prompt, pages = group_of(4, tree=True)
    group = tentative(prompt)
    assert flashinfer.supports(group, layer, pages)
    assert flashinfer.supports(replace(prompt, width=1), layer, pages)
    refused = [
        (prompt, layer, pages),
        (replace(group, width=65), layer, pages),
        (group, replace(layer, heads=66), pages),
        (group, layer, pages.float()),
        (group, layer, pages.to(FP8)),
        (group, layer, group_of(4, tree=True, dim=24)[1]),
        (group, layer, group_of(4, tree=True, dim=272)[1]),
        (group, layer, pages[:, :, :8]),
        (group, layer, pages.transpose(2, 3)),
    ]
    assert not any(flashinfer.supports(*own) for own in refused)
    monkeypatch.setattr(layer_flashinfer, "attend", None)
    projected, wide_layer, rotation, wide_pages, wide_group = make_layer(
        torch.float32, gated=True, norm=None, rotated=0, lengths=(5,), tree=(-1, 0)
    )
    expected = layer_reference.self_attention(
        projected, wide_layer, rotation, copy_of(wide_pages), wide_group
    )
    out = layer_flashinfer.FlashInferAttention().self_attention(
        projected, wide_layer, rotation, wide_pages, wide_group
    )
    assert_close(out, expected)


QWEN = {**SHAPES["qwen3-next-80b-a3b"], "num_hidden_layers": 2, "full_attention_interval": 2}


@pytest.fixture
def scratches(monkeypatch: pytest.MonkeyPatch) -> Scratches:
    """Record XQA's scratch buffers by width, and run no kernel."""
    noted: Scratches = defaultdict(list)

    def note(*given: Any, q_seq_len: int, **_: Any) -> None:
        noted[q_seq_len].append(given[-2:])

    monkeypatch.setattr(sys.modules["flashinfer.xqa"], "xqa", note)
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    return noted


def make_engine(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    def change(settings: Resolved) -> Resolved:
        return replace(settings, kernels="flashinfer")

    tree = {"draft": "mtp", "num_steps": 4, "topk": 4, "num_draft_tokens": 8}
    return without_host.make(monkeypatch, QWEN, change, **tree)


@without_gpu
def test_no_module_is_built_for_the_width_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch, scratches: Scratches
) -> None:
    """Nor for a head's prefill: compiling a module takes nvcc a minute or two."""
    model = make_engine(monkeypatch)
    precompile(model.loop, model.network, 4096)
    assert sorted(scratches) == [1, 2, 4, 8]


@without_gpu
def test_engines_of_one_process_share_no_scratch(
    monkeypatch: pytest.MonkeyPatch, scratches: Scratches
) -> None:
    """Their steps run on different streams; all layers and graphs of one engine share its scratch."""
    used = []
    for _ in range(2):
        runner = make_engine(monkeypatch).loop.runner
        assert runner
        scratches.clear()
        with torch.inference_mode():
            for key in (*runner.graph_keys(), GraphKey.given(4, filtered=True)):
                runner.batch.step(runner.batch.rows, key)
        assert set(scratches) == {1, 4, 8}
        used.append({id(own): own for given in scratches.values() for pair in given for own in pair})
        assert len(used[-1]) == 2
    assert not used[0].keys() & used[1].keys()
