"""The convolution's GPU kernels, in the interpreter, against the reference."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.conv import reference, triton
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from tests.kernels.interpreter import poison
from tests.kernels.trees import (
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
from tests.tolerances import KERNEL

SLOTS = {1: (4,), 3: (7, 2, 5)}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(layer: Layer, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    """Draw a float32 weight, as models store it, and a bias in the model's dtype."""
    weight_CK = noise(layer.taps, layer.channels, seed=2).t()
    return weight_CK, noise(layer.channels, dtype=layer.dtype) if bias else None


def with_records(
    layer: Layer, rows: int, width: int = 6
) -> tuple[RecurrentMemory, list[list[tuple[int, int]]]]:
    """Record a window in every row."""
    memory, records = make_memory(layer, SLOTS[rows]), scattered(rows, width, seed=5)
    group = build_group([chain(width)] * rows, SLOTS[rows], records=records, conv_taps=layer.taps)
    x_TC = noise(rows * width, layer.channels, dtype=layer.dtype, seed=7)
    reference.causal_conv(x_TC, *weights(layer, bias=False), memory, group)
    return memory, records


def assert_equals_reference(
    x_TC: Tensor, layer: Layer, memory: RecurrentMemory, group: Group, *, bias: bool
) -> None:
    tolerance, actual_memory, expected_memory = KERNEL[layer.dtype], copy_of(memory), copy_of(memory)
    actual, expected = (
        ops.causal_conv(x_TC, *weights(layer, bias=bias), own, group, silu=layer.taps != 2)
        for ops, own in ((triton, actual_memory), (reference, expected_memory))
    )
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_same_memory(actual_memory, expected_memory, 0.0)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("kind", "width", "taps", "backing", "pending", "dtype"),
    [
        ("chain", 1, 4, "certain", True, torch.bfloat16),
        ("chain", 1, 4, "record", True, torch.float32),
        ("chain", 7, 2, "certain", True, torch.float32),
        ("chain", 63, 4, "record", True, torch.bfloat16),
        ("random", 9, 4, "record", True, torch.bfloat16),
        ("random", 9, 2, "record", False, torch.float32),
        ("star", 64, 4, "record", True, torch.float32),
        ("random", 9, 1, "record", True, torch.float32),
        ("chain", 2, 4, "snapshot", False, torch.float32),
        ("random", 9, 4, "snapshot", False, torch.bfloat16),
        ("random", 9, 1, "snapshot", False, torch.float32),
    ],
)
def test_window_equals_reference(
    kind: str, width: int, taps: int, backing: str, pending: bool, dtype: torch.dtype, rows: int
) -> None:
    """Rows have pending paths of 0, 2 and 5 inputs; inputs are columns of a wider projection."""
    layer, slots = Layer(taps=taps, channels=131 if width == 2 else 9, dtype=dtype), SLOTS[rows]
    memory, records = with_records(layer, rows)
    paths = [own[:length] for own, length in zip(records, [0, 2, 5] if rows == 3 else [2], strict=True)]
    group = build_group(
        [draw(kind, width, seed) for seed in range(rows)],
        slots,
        paths=paths if pending else None,
        records=scattered(rows, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(rows, width, slots) if backing == "snapshot" else None,
        conv_taps=taps,
    )
    x_TC = noise(rows * width, layer.channels + 3, dtype=dtype)[:, 2:-1]
    assert_equals_reference(x_TC, layer, memory, group, bias=bool(width % 2))


@pytest.mark.parametrize(("width", "dtype"), [(65, torch.float32), (130, torch.bfloat16)])
def test_long_chain_equals_reference(width: int, dtype: torch.dtype) -> None:
    """Wider than one program: the old window is replaced after all have read it."""
    layer = Layer(dtype=dtype)
    memory, records = with_records(layer, 3)
    group = build_group([chain(width)] * 3, SLOTS[3], paths=[records[0][:3], [], records[2][:6]])
    assert_equals_reference(noise(3 * width, layer.channels, dtype=dtype), layer, memory, group, bias=True)


@pytest.mark.parametrize("backing", ["certain", "record", "snapshot"])
def test_the_dummy_row_changes_nothing_and_gives_zero(backing: str) -> None:
    """The dummy row uses slot 0 and record (0, 0); all its inputs may be NaN."""
    layer, slots = Layer(dtype=torch.float32), (4, 0)
    memory = make_memory(layer, (4,))
    before = copy_of(memory)
    x_TC = noise(6, layer.channels)
    x_TC[3:] = torch.nan
    records = [[(1, i) for i in range(3)], [(0, 0)] * 3] if backing == "record" else None
    snapshots = [[8, 9, 10], [0, 0, 0]] if backing == "snapshot" else None
    group = build_group([chain(3)] * 2, slots, records=records, snapshots=snapshots)
    out_TC = triton.causal_conv(x_TC, *weights(layer, bias=True), memory, group)
    assert torch.equal(out_TC[3:], torch.zeros(3, layer.channels))
    backing = {"records": records and records[:1], "snapshots": snapshots and snapshots[:1]}
    alone = build_group([chain(3)], (4,), **backing)
    expected = reference.causal_conv(x_TC[:3], *weights(layer, bias=True), before, alone)
    torch.testing.assert_close(out_TC[:3], expected)
    assert_same_memory(memory, before, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "width"), [("chain", 2), ("random", 17)])
def test_a_path_is_convolved_to_the_same_bits_again(kind: str, width: int, dtype: torch.dtype) -> None:
    """Memory after a path's end is arbitrary; rows accept all, no, and one token."""
    layer = Layer(channels=64, dtype=dtype)
    trees, records = [draw(kind, width, seed) for seed in range(3)], scattered(3, width, seed=9)
    memory = make_memory(layer, SLOTS[3])
    x_TC = noise(3 * width, 64, dtype=dtype)
    group = build_group(trees, SLOTS[3], records=records)
    y_BMC = triton.causal_conv(x_TC, *weights(layer, bias=True), memory, group).view(3, width, 64)
    before, nodes = copy_of(memory), [path_to(trees[0], width - 1), [], [0]]
    paths = [[records[b][node] for node in own] for b, own in enumerate(nodes)]
    pending = build_group([chain(1)] * 3, SLOTS[3], paths=paths)
    found_BPC = triton.path_conv(
        *weights(layer, bias=True),
        slice(16, 48),
        memory,
        *(pending.state_B, pending.path, pending.path_length_B),
    )
    for b, own in enumerate(nodes):
        assert torch.equal(found_BPC[b, : len(own)], y_BMC[b, own, 16:48])
    assert_same_memory(memory, before, 0.0)


def test_fold_gives_the_window_at_any_accepted_position() -> None:
    layer = Layer(dtype=torch.float32)
    memory, records = with_records(layer, 3)
    path = RecordIds(*(torch.tensor([[at[n] for at in row] for row in records]) for n in range(2)))
    actual, expected, lengths_B = copy_of(memory), copy_of(memory), torch.tensor([0, 2, 5])
    triton.fold_window(actual, torch.tensor(SLOTS[3]), path, lengths_B)
    reference.fold_window(expected, torch.tensor(SLOTS[3]), path, lengths_B)
    assert_same_memory(actual, expected, 0.0)


def test_a_swapped_parent_and_a_stale_path_are_noticed() -> None:
    layer, tree = Layer(dtype=torch.float32), random_tree(9, seed=8)
    memory, (records,) = with_records(layer, 1)
    x_TC, other = noise(9, layer.channels), (*tree[:7], tree[7] - 1, *tree[8:])

    def outputs(parents: tuple[int, ...], path: list[tuple[int, int]]) -> Tensor:
        group = build_group([parents], SLOTS[1], paths=[path], records=scattered(1, 9, seed=9))
        return triton.causal_conv(x_TC, *weights(layer, bias=False), copy_of(memory), group)

    right = outputs(tree, records[:2])
    assert not torch.allclose(right[7], outputs(other, records[:2])[7])
    assert not torch.allclose(right[0], outputs(tree, [records[0], records[3]])[0])
