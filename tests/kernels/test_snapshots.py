"""Windows that leave whole states, against the reference; and recomputed keys."""

from types import ModuleType

import pytest
import torch

from specdec.kernels import rows as kernel_rows
from specdec.kernels.conv import cpu as conv_cpu
from specdec.kernels.conv import reference as conv_reference
from specdec.kernels.native import compiled, recurrent
from specdec.kernels.recurrence import cpu, reference, states
from tests.kernels.trees import (
    SLABS,
    Layer,
    assert_same_memory,
    build_group,
    chain,
    copy_of,
    draw,
    make_memory,
    path_to,
    random_tree,
    scattered,
    snapshot_slots,
)
from tests.tolerances import KERNEL, KERNEL_FLOAT32, KERNEL_FLOAT64

SLOTS = {1: [4], 3: [7, 2, 5]}
needs_c = pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler")


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(params=["gathered", "in place", "device"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with states gathered, with states processed in place row by row, and by ids as on a device."""
    monkeypatch.setattr(states, "LARGE", 0 if request.param == "in place" else 1 << 40)
    for module in (kernel_rows, states):
        monkeypatch.setattr(module, "on_host", lambda ids: request.param != "device")


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("ops", ["cpu", pytest.param("native", marks=needs_c)])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("kind", "width"), [("chain", 1), ("chain", 7), ("star", 5), ("random", 9)])
def test_recurrence_equals_reference(kind: str, width: int, rows: int, delta: bool, ops: str) -> None:
    dtype = torch.float32 if ops == "native" else torch.float64
    layer, slots = Layer(heads=2 + 2 * (width % 3), dtype=dtype), SLOTS[rows]
    trees = [draw(kind, width, seed) for seed in range(rows)]
    group = build_group(trees, slots, snapshots=snapshot_slots(rows, width, slots))
    tokens = rows * width
    q, k = (0.4 * noise(tokens, layer.groups, layer.key, dtype=dtype, seed=s) for s in (1, 2))
    v = noise(tokens, layer.heads, layer.value, dtype=dtype, seed=3)
    decay = -noise(tokens, layer.heads, dtype=dtype, seed=4).square()
    beta = noise(tokens, layer.heads, dtype=dtype, seed=5).sigmoid() if delta else None
    actual_memory, expected_memory = (make_memory(layer, slots) for _ in range(2))
    run = recurrent.scan_window if ops == "native" else cpu.scan_window
    actual = run(q, k, v, decay, beta, actual_memory, group, None)
    expected = reference.scan_window(q, k, v, decay, beta, expected_memory, group, None)
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert_same_memory(actual_memory, expected_memory, KERNEL[dtype])


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(("kind", "width"), [("chain", 1), ("chain", 2), ("chain", 9), ("random", 9)])
def test_convolution_equals_reference(kind: str, width: int, taps: int, rows: int) -> None:
    layer, slots = Layer(taps=taps), SLOTS[rows]
    trees = [draw(kind, width, seed) for seed in range(rows)]
    group = build_group(trees, slots, snapshots=snapshot_slots(rows, width, slots), conv_taps=taps)
    x_TC, weight_CK = noise(rows * width, layer.channels), noise(layer.channels, taps, seed=2)
    actual_memory, expected_memory = (make_memory(layer, slots) for _ in range(2))
    actual = conv_cpu.causal_conv(x_TC, weight_CK, None, actual_memory, group)
    expected = conv_reference.causal_conv(x_TC, weight_CK, None, expected_memory, group)
    torch.testing.assert_close(actual, expected, rtol=KERNEL_FLOAT64, atol=KERNEL_FLOAT64)
    assert_same_memory(actual_memory, expected_memory, 0.0)


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "taps"), [("chain", 1), ("chain", 4), ("random", 2), ("random", 4)])
def test_convolution_in_c_equals_torch(kind: str, taps: int, dtype: torch.dtype) -> None:
    layer, slots = Layer(taps=taps, dtype=dtype), SLOTS[3]
    trees = [draw(kind, 7, seed) for seed in range(3)]
    group = build_group(trees, slots, snapshots=snapshot_slots(3, 7, slots), conv_taps=taps)
    x_TC, weight_KC = noise(21, layer.channels, dtype=dtype), noise(taps, layer.channels, dtype=torch.float32)
    actual_memory, expected_memory = (make_memory(layer, slots) for _ in range(2))
    actual = recurrent.causal_conv(x_TC, weight_KC.t(), None, actual_memory, group)
    expected = conv_cpu.causal_conv(x_TC, weight_KC.t(), None, expected_memory, group)
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert_same_memory(actual_memory, expected_memory, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", [conv_reference, conv_cpu, pytest.param(recurrent, marks=needs_c)])
@pytest.mark.parametrize(("kind", "width"), [("chain", 1), ("chain", 2), ("chain", 9), ("random", 17)])
def test_a_path_is_convolved_to_the_same_bits_again(
    kind: str, width: int, ops: ModuleType, dtype: torch.dtype
) -> None:
    """A record is folded with exactly the keys that its update was solved with.

    The channels fill whole vectors, as heads do: torch's silu rounds a vector's remainder differently.
    """
    layer, slots = Layer(channels=64, dtype=dtype), SLOTS[1]
    tree, records = draw(kind, width, 3), scattered(1, width, seed=9)
    weight_CK = noise(4, 64, dtype=torch.float32).t()
    bias_C = noise(64, dtype=dtype, seed=4)
    memory = make_memory(layer, slots)
    x_TC = noise(width, 64, dtype=dtype, seed=5)
    y_TC = ops.causal_conv(x_TC, weight_CK, bias_C, memory, build_group([tree], slots, records=records))
    before, nodes = copy_of(memory), path_to(tree, width - 1)
    group = build_group([chain(1)], slots, paths=[[records[0][node] for node in nodes]])
    pending = (group.state_B, group.path, group.path_length_B)
    found_BPC = ops.path_conv(weight_CK, bias_C, slice(16, 48), memory, *pending)
    assert torch.equal(found_BPC[0], y_TC[nodes, 16:48])
    assert_same_memory(memory, before, 0.0)


@pytest.mark.parametrize("ops", [conv_reference, conv_cpu, pytest.param(recurrent, marks=needs_c)])
def test_padding_of_a_path_does_not_reach_its_tokens(ops: ModuleType) -> None:
    layer, slots = Layer(dtype=torch.float32), SLOTS[3]
    weight_CK, records = noise(4, layer.channels, dtype=torch.float32).t(), scattered(3, 5, seed=9)
    memory = make_memory(layer, slots)
    x_TC = noise(15, layer.channels, dtype=torch.float32)
    y_TC = ops.causal_conv(x_TC, weight_CK, None, memory, build_group([chain(5)] * 3, slots, records=records))
    lengths = [0, 5, 2]
    paths = [own[:length] for own, length in zip(records, lengths, strict=True)]
    group = build_group([chain(1)] * 3, slots, paths=paths)
    pending = (group.state_B, group.path, group.path_length_B)
    found_BPC = ops.path_conv(weight_CK, None, slice(0, layer.channels), memory, *pending)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(
            found_BPC[b, :length],
            y_TC[5 * b : 5 * b + length],
            rtol=KERNEL_FLOAT32,
            atol=KERNEL_FLOAT32,
        )


def test_a_window_leaves_records_or_states_and_states_are_up_to_date() -> None:
    tree, slots = random_tree(3, seed=0), snapshot_slots(1, 3, [4])
    with pytest.raises(AssertionError, match="a record or a state"):
        build_group([tree], [4], records=scattered(1, 3, seed=1), snapshots=slots)
    with pytest.raises(AssertionError, match="up to date"):
        build_group([tree], [4], paths=[[(SLABS - 1, 0)]], snapshots=slots)
