"""C kernels of narrow windows against the torch kernels, and the fallback without a compiler."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.kernels.attention import cpu as attention
from specdec.kernels.conv import cpu as conv
from specdec.kernels.delta_net.composed import ComposedDeltaNet
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.ffn import cpu as ffn
from specdec.kernels.gates import cpu as gates
from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.native import attention as native_attention
from specdec.kernels.native import compiled, pointwise, recurrent
from specdec.kernels.native import gather as native_gather
from specdec.kernels.native.call import TOKENS, path_width
from specdec.kernels.norm import cpu as norm
from specdec.kernels.recurrence import cpu as recurrence
from specdec.kernels.rope import cpu as rope
from specdec.kernels.self_attention.composed import ComposedAttention
from specdec.kernels.self_attention.layer import AttentionLayer
from tests.kernels import trees
from tests.kernels.blocks import layer_of, make_blocks
from tests.tolerances import BFLOAT16_ATTENTION, KERNEL

WIDTHS = (1, 2, 7, 16)
DTYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def only_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a C kernel falls back to torch, which would compare torch with itself."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the plain form was called")

    for module, names in (
        (norm, ("rms_norm", "add_rms_norm", "gated_norm")),
        (rope, ("rotate",)),
        (ffn, ("swiglu", "geglu")),
        (attention, ("append", "attend")),
        (conv, ("causal_conv", "path_conv")),
        (recurrence, ("scan_window",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


PLAIN = {
    name: getattr(module, name)
    for module, names in (
        (norm, ("rms_norm", "add_rms_norm", "gated_norm")),
        (rope, ("rotate",)),
        (ffn, ("swiglu", "geglu")),
        (gates, ("l2_normalise", "delta_gates")),
        (attention, ("append", "attend")),
        (conv, ("causal_conv", "path_conv")),
        (recurrence, ("scan_window",)),
    )
    for name in names
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = KERNEL[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 65, 256])
def test_norms_equal_torch_and_accept_strides(dtype: torch.dtype, size: int) -> None:
    x_TD, x_THD = draw(3, 2 * size, dtype=dtype)[:, size:], draw(3, 5, 2 * size, dtype=dtype)[..., :size]
    for weight_D in (draw(size), draw(size, dtype=dtype)):
        close(pointwise.rms_norm(x_TD, weight_D, 1e-6), PLAIN["rms_norm"](x_TD, weight_D, 1e-6))
        close(pointwise.rms_norm(x_THD, weight_D, 1e-6), PLAIN["rms_norm"](x_THD, weight_D, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weights", [60, 15, 0])
def test_gated_norm_equals_the_plain_form(dtype: torch.dtype, gate_first: bool, weights: int) -> None:
    x_TD, gate_TD = draw(3, 60), draw(3, 90, dtype=dtype, seed=1)[:, 10:70]
    weight_D = draw(weights, dtype=dtype, seed=2) if weights else None
    arguments = (x_TD, gate_TD, weight_D, 1e-5, 15)
    expected = PLAIN["gated_norm"](*arguments, gate_first=gate_first)
    close(pointwise.gated_norm(*arguments, gate_first=gate_first), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_equal_the_plain_form(dtype: torch.dtype) -> None:
    x_TI = 8 * draw(5, 126, dtype=dtype)
    for limit in (torch.inf, 0.5):
        close(pointwise.swiglu(x_TI, limit), PLAIN["swiglu"](x_TI, limit))
    close(pointwise.geglu(x_TI), PLAIN["geglu"](x_TI))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(16, 2), (31, 15), (8, 4)])
def test_rotate_equals_the_plain_form(dtype: torch.dtype, dim: int, half: int) -> None:
    x_THD = draw(4, 3, 2 * dim, dtype=dtype)[..., :dim]
    cos_TR, sin_TR = rope.rope_table(torch.arange(4) * 100, 2 * half, 1e4)
    found_THD, expected_THD = (form(x_THD, cos_TR, sin_TR) for form in (pointwise.rotate, PLAIN["rotate"]))
    close(found_THD, expected_THD)
    # A key must not depend on the kernel; in float32 the compiler may fuse multiply and add.
    assert dtype == torch.float32 or torch.equal(found_THD, expected_THD)


def recurrent_case(
    kind: str, width: int, rows: int, recorded: bool, layer: trees.Layer
) -> tuple[Group, Group]:
    """Return a window that leaves records, and one that folds a path of them and reuses the others."""
    slots = [7, 2, 5][:rows]
    tree = [trees.draw(kind, width, seed) for seed in range(rows)]
    records = trees.scattered(rows, 2 * width, seed=3)
    first = trees.build_group(
        tree, slots, records=[record[:width] for record in records], conv_taps=layer.taps
    )
    paths = [
        [own[node] for node in trees.path_to(parents, width - 1)][: 0 if row == 1 else None]
        for row, (own, parents) in enumerate(zip(records, tree, strict=True))
    ]
    certain = [trees.chain(width)] * rows
    second = trees.build_group(
        tree if recorded else certain,
        slots,
        paths=paths,
        records=[record[width:] for record in records] if recorded else None,
        conv_taps=layer.taps,
    )
    third = trees.build_group(
        tree, slots, paths=paths, records=[record[:width] for record in records], conv_taps=layer.taps
    )
    return first, second, third


@pytest.mark.parametrize("with_beta", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
@pytest.mark.parametrize("width", WIDTHS[:-1])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sizes", ["one thread", "all threads"])
def test_recurrence_equals_torch_over_two_windows(
    sizes: str, rows: int, width: int, kind: str, recorded: bool, with_beta: bool
) -> None:
    layer = trees.Layer(dtype=torch.float32)
    if sizes == "all threads":
        layer = replace(layer, heads=16, key=48, value=47)
    scale = layer.key**-0.5
    ours, theirs = (trees.make_memory(layer, [7, 2, 5][:rows]) for _ in range(2))
    groups = recurrent_case(kind, width, rows, recorded, layer)
    k_path_BPGK = scale * draw(rows, path_width(groups[1]), layer.groups, layer.key, seed=9)
    for seed, group in enumerate(groups):
        tokens = rows * width
        q_TGK, k_TGK = (scale * draw(tokens, layer.groups, layer.key, seed=10 * seed + s) for s in (1, 2))
        v_THW = draw(tokens, layer.heads, layer.value, seed=10 * seed + 3)
        decay_TH = -draw(tokens, layer.heads, seed=10 * seed + 4).abs()
        beta_TH = draw(tokens, layer.heads, seed=10 * seed + 5).sigmoid() if with_beta else None
        inputs = (q_TGK, k_TGK, v_THW, decay_TH, beta_TH)
        k_path = None if group.path is None else k_path_BPGK
        found = recurrent.scan_window(*inputs, ours, group, k_path)
        close(found, PLAIN["scan_window"](*inputs, theirs, group, k_path))
        trees.assert_same_memory(ours, theirs, KERNEL[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", ["chain", "random"])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 7), (3, 2), (2, 16)])
def test_convolution_equals_torch_over_two_windows(
    rows: int, width: int, taps: int, kind: str, recorded: bool, dtype: torch.dtype
) -> None:
    layer = trees.Layer(dtype=dtype, taps=taps)
    ours, theirs = (trees.make_memory(layer, [7, 2, 5][:rows]) for _ in range(2))
    weight_CK = draw(taps, layer.channels).t()
    bias_C = draw(layer.channels, seed=1)
    for seed, group in enumerate(recurrent_case(kind, width, rows, recorded, layer)):
        x_TC = draw(rows * width, layer.channels + 4, dtype=dtype, seed=seed)[:, 2:-2]
        arguments = (x_TC, weight_CK, bias_C if seed else None)
        if group.path is not None and rows * path_width(group) <= TOKENS:
            on_path = (*arguments[1:], slice(2, 7), ours, group.state_B, group.path, group.path_length_B)
            found_BPC, expected_BPC = (f(*on_path) for f in (recurrent.path_conv, PLAIN["path_conv"]))
            for b, length in enumerate(group.path_length_B.tolist()):
                close(found_BPC[b, :length], expected_BPC[b, :length])
        silu = taps != 2
        expected = PLAIN["causal_conv"](*arguments, theirs, group, silu=silu)
        close(recurrent.causal_conv(*arguments, ours, group, silu=silu), expected)
        trees.assert_same_memory(ours, theirs, 0.0)


def attention_group(lengths: list[int], parents: list[trees.Parents]) -> Group:
    base = trees.build_group(parents, list(range(len(lengths))))
    generator = torch.Generator().manual_seed(1)
    table_BN = torch.randperm(40, generator=generator)[: 8 * len(lengths)].view(len(lengths), 8)
    return Group(
        start=0,
        rows=base.rows,
        width=base.width,
        state_B=base.state_B,
        path=None,
        path_length_B=None,
        record=None,
        snapshot_BM=None,
        ancestors_BMM=base.ancestors_BMM,
        tap_BMC=None,
        table_BN=table_BN,
        length_B=torch.tensor(lengths),
        max_length=max(lengths),
    )


def attend(q_THD: Tensor, k_TJD: Tensor, v_TJD: Tensor, pages: Tensor, group: Group) -> Tensor:
    """Run a layer that only attends."""
    layer = AttentionLayer(q_THD.shape[1], k_TJD.shape[1], q_THD.shape[2], 0.2, False, None, None, 0.0)
    projected_TN = torch.cat([x.flatten(1) for x in (q_THD, k_TJD, v_TJD)], dim=1)
    return native_attention.self_attention(projected_TN, layer, None, pages, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["chain", "star", "random"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", [[0], [63], [17, 0]])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 9), (2, 2, 64)])
def test_attention_equals_the_plain_form(
    heads: int, kv_heads: int, dim: int, lengths: list[int], width: int, kind: str, dtype: torch.dtype
) -> None:
    """Unwritten positions hold NaN, which must not be seen."""
    group = attention_group(lengths, [trees.draw(kind, width, seed) for seed in range(len(lengths))])
    ours = layer_of(make_blocks(40, 2, 16, kv_heads, dim, dtype=dtype))
    for row, length in enumerate(lengths):
        for at in range(length):
            block = group.table_BN[row, at // 16]
            ours[block, :, at % 16] = draw(2, kv_heads, dim, dtype=dtype, seed=1000 * row + at)
    theirs = ours.clone()
    tokens = len(lengths) * width
    k_TJD, v_TJD = (
        draw(tokens, kv_heads * dim + 3, dtype=dtype, seed=s)[:, 3:].view(tokens, kv_heads, dim)
        for s in (1, 2)
    )
    native_attention.append(k_TJD, v_TJD, ours, group)
    PLAIN["append"](k_TJD, v_TJD, theirs, group)
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    q_THD = draw(tokens, heads, dim, dtype=dtype, seed=3)
    found_TN = attend(q_THD, k_TJD, v_TJD, ours, group)
    close(found_TN, PLAIN["attend"](q_THD, theirs, group, 0.2).flatten(1))


def test_a_wrong_ancestor_is_seen() -> None:
    """The mutant: one wrong entry of the mask."""
    parents = trees.star(5)
    group = attention_group([20], [parents])
    pages = draw(40, 2, 16, 2, 16)
    q_THD = draw(5, 4, 16, seed=1)
    k_TJD = draw(5, 2, 16, seed=2)
    right = attend(q_THD, k_TJD, k_TJD, pages, group)
    assert group.ancestors_BMM is not None
    group.ancestors_BMM[0, 4, 3] = True
    wrong = attend(q_THD, k_TJD, k_TJD, pages, group)
    assert torch.equal(right[:4], wrong[:4])
    assert not torch.allclose(right[4], wrong[4], rtol=KERNEL[torch.float32])


@pytest.mark.parametrize("break_it", ["missing", "failing"])
def test_without_a_working_compiler_torch_runs_with_a_warning(
    break_it: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "BUILT", tmp_path)
    if break_it == "missing":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", "false")
    uncached: Callable[[], object] = compiled.loaded.__wrapped__
    assert uncached() is None
    assert "plain torch" in caplog.text


def test_without_openmp_one_thread_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "BUILT", tmp_path)
    monkeypatch.setattr(compiled, "THREADS", ("-fno-such-flag", compiled.THREADS[1]))
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-O1"))  # the library is compiled but not run
    caplog.set_level("INFO")
    uncached: Callable[[], object] = compiled.loaded.__wrapped__
    assert uncached() is not None
    assert compiled.THREADS[1] in caplog.text
    assert "Compiling the C kernels for this processor" in caplog.text
    caplog.clear()
    assert uncached() is not None and "C kernels for" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_equals_torch_bit_for_bit(dtype: torch.dtype) -> None:
    x_TD = draw(3, 65, dtype=dtype)
    assert torch.equal(native_gather.scale(x_TD, 0.22), x_TD * 0.22)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_norm_equals_torch(dtype: torch.dtype) -> None:
    ours_TD, y_TD, weight_D = draw(3, 65, dtype=dtype), draw(3, 65, dtype=dtype, seed=1), draw(65, seed=2)
    sum_TD = ours_TD + y_TD
    found = pointwise.add_rms_norm(ours_TD, y_TD, weight_D, 1e-6)
    close(found, PLAIN["rms_norm"](sum_TD, weight_D, 1e-6))
    assert torch.equal(ours_TD, sum_TD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 1), (1, 7), (3, 5)])
def test_delta_net_equals_torch_over_two_windows(
    rows: int, width: int, recorded: bool, dtype: torch.dtype
) -> None:
    sizes = trees.Layer(dtype=dtype, channels=2 * 2 * 6 + 4 * 5)
    ours, theirs = (with_float32_states(trees.make_memory(sizes, [7, 2, 5][:rows])) for _ in range(2))
    layer = DeltaLayer(
        *(sizes.groups, sizes.heads, sizes.key, sizes.value),
        conv_CK=draw(sizes.taps, sizes.channels).t(),
        A_log_H=draw(4, seed=1),
        dt_bias_H=draw(4, seed=2),
        norm_W=draw(5, dtype=dtype, seed=3),
        eps=1e-6,
        beta_scale=2.0 if recorded else 1.0,
    )
    for seed, group in enumerate(recurrent_case("random", width, rows, recorded, sizes)):
        projected_TN = draw(rows * width, sum(layer.widths), dtype=dtype, seed=seed)
        expected = ComposedDeltaNet(*(PLAIN[f] for f in ComposedDeltaNet._fields)).delta_net(
            projected_TN, layer, theirs, group
        )
        close(recurrent.delta_net(projected_TN, layer, ours, group), expected)
        trees.assert_same_memory(ours, theirs, KERNEL[dtype])


def with_float32_states(memory: RecurrentMemory) -> RecurrentMemory:
    """Keep all but the convolution's parts in float32, as an arena does."""
    return RecurrentMemory(
        *(
            x if name in ("window_SIC", "input_SRC") else x.float()
            for name, x in zip(RecurrentMemory._fields, memory, strict=True)
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("gated", "normed", "rotated"), [(1, 1, 1), (0, 1, 1), (1, 0, 0), (0, 0, 1)])
@pytest.mark.parametrize(("lengths", "width"), [([0], 1), ([33, 7], 5), ([120], 1), ([70, 0], 39)])
def test_self_attention_equals_torch(
    lengths: list[int],
    width: int,
    gated: int,
    normed: int,
    rotated: int,
    dtype: torch.dtype,
) -> None:
    group = attention_group(lengths, [trees.draw("random", width, seed) for seed in range(len(lengths))])
    ours, tokens = draw(40, 2, 16, 2, 8, dtype=dtype), len(lengths) * width
    theirs = ours.clone()
    norm_dtype = torch.float32 if gated else dtype
    q_norm_D, k_norm_D = (draw(8, dtype=norm_dtype, seed=s) if normed else None for s in (1, 2))
    layer = AttentionLayer(6, 2, 8, 0.3, bool(gated), q_norm_D, k_norm_D, 1e-6)
    rotation = rope.rope_table(torch.arange(tokens) * 9, 4, 1e4) if rotated else None
    projected_TN = draw(tokens, sum(layer.widths), dtype=dtype, seed=3)
    plain = ComposedAttention(*(PLAIN[name] for name in ComposedAttention._fields))
    expected = plain.self_attention(projected_TN, layer, rotation, theirs, group)
    close(native_attention.self_attention(projected_TN, layer, rotation, ours, group), expected)
    torch.testing.assert_close(ours, theirs, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@pytest.mark.parametrize("wide", [False, True])
def test_keys_are_rounded_once_or_with_every_product(wide: bool) -> None:
    group = attention_group([0], [trees.chain(9)])
    pages = torch.zeros(40, 2, 16, 2, 8, dtype=torch.bfloat16)
    layer = AttentionLayer(6, 2, 8, 0.3, False, None, None, 0.0, wide_rotation=wide)
    rotation = rope.rope_table(torch.arange(9) * 9, 8, 1e4)
    projected_TN = draw(9, sum(layer.widths), dtype=torch.bfloat16, seed=3)
    native_attention.self_attention(projected_TN, layer, rotation, pages, group)
    k_TJD = projected_TN[:, 6 * 8 : 8 * 8].view(9, 2, 8)
    once_TJD = PLAIN["rotate"](k_TJD.float(), *rotation).bfloat16()
    each_TJD = PLAIN["rotate"](k_TJD, *rotation)
    assert not torch.equal(once_TJD, each_TJD)
    assert torch.equal(pages[group.table_BN[0, 0], 0, :9], once_TJD if wide else each_TJD)


def test_attention_rounds_its_weights_as_torch_does() -> None:
    """Without rounding, three of four outputs would still be equal."""
    group = attention_group([70], [trees.chain(1)])
    pages, layer = (
        draw(40, 2, 16, 2, 16, dtype=torch.bfloat16),
        AttentionLayer(64, 2, 16, 0.25, False, None, None, 0),
    )
    projected_TN = draw(1, sum(layer.widths), dtype=torch.bfloat16, seed=1)
    plain = ComposedAttention(*(PLAIN[name] for name in ComposedAttention._fields))
    expected = plain.self_attention(projected_TN, layer, None, pages, group)
    found = native_attention.self_attention(projected_TN, layer, None, pages, group)
    assert (found == expected).float().mean() >= BFLOAT16_ATTENTION


def test_no_buffer_follows_the_processs_default_type() -> None:
    """Half-size buffers would be written beyond their end."""
    layer = trees.Layer(dtype=torch.float32)
    memories = [trees.make_memory(layer, [7]) for _ in range(2)]
    group = trees.build_group([trees.chain(3)], [7])
    inputs = (draw(3, 2, 6), draw(3, 2, 6), draw(3, 4, 5), -draw(3, 4).abs(), None)
    expected = recurrent.scan_window(*inputs, memories[0], group, None)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = recurrent.scan_window(*inputs, memories[1], group, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
