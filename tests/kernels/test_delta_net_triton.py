"""Whole recurrent layers on the GPU's kernels, in the interpreter: window memory and rollback."""

import pytest
import torch
from torch import Tensor

from specdec.kernels.delta_net import triton
from specdec.kernels.delta_net.composed import REFERENCE as reference
from specdec.kernels.delta_net.layer import DeltaLayer
from specdec.kernels.group import RecurrentMemory
from tests.kernels.interpreter import poison
from tests.kernels.mixers import Mixer
from tests.kernels.trees import (
    Layer,
    assert_same_memory,
    build_group,
    chain,
    copy_of,
    draw,
    make_memory,
    path_to,
    scattered,
    snapshot_slots,
    with_inputs,
)
from tests.tolerances import KERNEL, KERNEL_FLOAT32

SLOTS = {1: (5,), 3: (7, 2, 5)}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_layer(dtype: torch.dtype) -> tuple[DeltaLayer, RecurrentMemory]:
    """Draw a layer whose values are longer than its keys; states are float32, inputs in their own dtype."""
    sizes = Layer(groups=1, heads=2, key=6, value=9, channels=2 * 6 + 2 * 9, dtype=torch.float32)
    layer = DeltaLayer(
        *(1, 2, 6, 9),
        conv_CK=noise(4, sizes.channels, seed=2).t(),
        A_log_H=noise(2, seed=3) - 2,
        dt_bias_H=noise(2, seed=4),
        norm_W=noise(9, dtype=dtype, seed=5),
        eps=1e-6,
        beta_scale=1.5,
    )
    memory = make_memory(sizes, SLOTS[3])
    return layer, with_inputs(memory, dtype)


def project(tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw a projection's output: queries, keys, values, gates, write strengths and decays."""
    return noise(tokens, 2 * 6 + 2 * 2 * 9 + 2 * 2, dtype=dtype, seed=seed)


def assert_same(actual: RecurrentMemory, expected: RecurrentMemory, dtype: torch.dtype) -> None:
    """Inputs are copied; updates and states are sums of values rounded to the model's dtype."""
    assert_same_memory(actual, expected, KERNEL[dtype])
    for x, y in ((actual.window_SIC, expected.window_SIC), (actual.input_SRC, expected.input_SRC)):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize(
    ("kind", "width", "backing", "pending", "rows", "dtype"),
    [
        ("chain", 1, "certain", True, 3, torch.bfloat16),
        ("random", 7, "record", True, 3, torch.float32),
        ("random", 9, "record", True, 1, torch.bfloat16),
        ("random", 5, "snapshot", False, 1, torch.bfloat16),
        ("chain", 66, "certain", True, 1, torch.float32),
    ],
)
def test_a_layer_equals_the_reference(
    kind: str, width: int, backing: str, pending: bool, rows: int, dtype: torch.dtype
) -> None:
    layer, memory = make_layer(dtype)
    records, slots = scattered(rows, 6, seed=5), SLOTS[rows]
    recorded = build_group([chain(6)] * rows, slots, records=records)
    reference.delta_net(project(6 * rows, dtype, seed=7), layer, memory, recorded)
    lengths = [2, 0, 5][:rows]
    paths = [own[:length] for own, length in zip(records, lengths, strict=True)] if pending else None
    group = build_group(
        [draw(kind, width, seed) for seed in range(rows)],
        slots,
        paths=paths,
        records=scattered(rows, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(rows, width, slots) if backing == "snapshot" else None,
    )
    projected_TN, expected_memory = project(rows * width, dtype), copy_of(memory)
    actual = triton.delta_net(projected_TN, layer, memory, group)
    expected = reference.delta_net(projected_TN, layer, expected_memory, group)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert_same(memory, expected_memory, dtype)


def test_recomputed_keys_are_bit_identical() -> None:
    """Recomputed by the window that folds them, and by a fold alone; rows accepted all, no, and one token."""
    layer, memory = make_layer(torch.bfloat16)
    records, tree = scattered(3, 5, seed=5), draw("random", 5, 3)
    projected_TN = project(15, torch.bfloat16)
    group, found = build_group([tree] * 3, SLOTS[3], records=records), {}

    def catch(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        found["new"], found["path"] = k, rest[-1]
        return scan_window(q, k, *rest)

    scan_window = triton.scan_window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "scan_window", catch)
        triton.delta_net(projected_TN, layer, memory, group)
        first, nodes = found["new"].view(3, 5, 1, 6), [path_to(tree, 4), [], [0]]
        paths = [[records[b][node] for node in own] for b, own in enumerate(nodes)]
        following = build_group([chain(1)] * 3, SLOTS[3], paths=paths)
        pending = (following.state_B, following.path, following.path_length_B)
        alone = triton.path_keys(layer, memory, *pending)
        triton.delta_net(project(3, torch.bfloat16), layer, memory, following)
    for b, own in enumerate(nodes):
        for k_path in (alone, found["path"]):
            assert torch.equal(k_path[b, : len(own)], first[b, own])


@pytest.mark.parametrize("kind", ["delta net, 1 to 1", "mamba-2", "lightning"])
def test_folding_accepted_nodes_equals_feeding_them(kind: str) -> None:
    """Rows accept a path or nothing; the next window folds it lazily, or after an explicit fold."""
    mixer, slots = Mixer(kind, "triton", torch.float32), [7, 2]
    tree, records = draw("random", 7, 1), scattered(2, 7, seed=3)
    path, x_TD, following_TD = path_to(tree, 6), mixer.inputs(14), mixer.inputs(4, seed=8)
    recorded, fed = mixer.memory(slots), mixer.memory(slots)
    out_TD = mixer.run(x_TD, recorded, build_group([tree] * 2, slots, records=records))
    alone_TD = mixer.feed(x_TD[path], fed, 7)
    torch.testing.assert_close(out_TD[path], alone_TD, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)

    accepted = [[records[0][node] for node in path], []]
    lazy = copy_of(recorded)
    pending = build_group([chain(2)] * 2, slots, paths=accepted)
    found_TD = mixer.run(following_TD, lazy, pending)
    mixer.fold(recorded, slots, accepted)
    for memory in (recorded, fed):
        expected_TD = mixer.run(following_TD, memory, build_group([chain(2)] * 2, slots))
        torch.testing.assert_close(found_TD, expected_TD, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)
        for slot in slots:
            for x, y in zip(lazy[:2], memory[:2], strict=True):
                torch.testing.assert_close(x[slot], y[slot], rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)
