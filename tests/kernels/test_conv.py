"""The convolution of a window against one output at a time, and its independence of rejected tokens."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels import rows as kernel_rows
from specdec.kernels.conv import cpu, reference
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from tests.kernels.trees import (
    Layer,
    Parents,
    assert_same_memory,
    build_group,
    chain,
    copy_of,
    draw,
    in_order,
    make_memory,
    path_to,
    random_tree,
    scattered,
)
from tests.tolerances import BFLOAT16_EQUAL, KERNEL, KERNEL_FLOAT32, KERNEL_FLOAT64

SLOTS = {1: (4,), 3: (7, 2, 5)}


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(layer: Layer, *, bias: bool) -> tuple[Tensor, Tensor | None]:
    weight_CK = noise(layer.channels, layer.taps, dtype=layer.dtype, seed=2)
    return weight_CK, noise(layer.channels, dtype=layer.dtype, seed=3) if bias else None


def with_pending(layer: Layer, rows: int) -> tuple[RecurrentMemory, list[list[tuple[int, int]]]]:
    """Record a window of 6 in every row and accept paths of different lengths, the first of three empty."""
    memory = make_memory(layer, SLOTS[rows])
    records = scattered(rows, 6, seed=5)
    group = build_group([chain(6)] * rows, SLOTS[rows], records=records, conv_taps=layer.taps)
    reference.causal_conv(
        noise(rows * 6, layer.channels, dtype=layer.dtype), *weights(layer, bias=False), memory, group
    )
    lengths = [0, 2, 5] if rows == 3 else [2]
    return memory, [records[b][:length] for b, length in enumerate(lengths)]


def start(
    layer: Layer, rows: int, *, pending: bool
) -> tuple[RecurrentMemory, list[list[tuple[int, int]]] | None]:
    return with_pending(layer, rows) if pending else (make_memory(layer, SLOTS[rows]), None)


def assert_equals_reference(
    x_TC: Tensor, layer: Layer, memory: RecurrentMemory, group: Group, bias: bool
) -> None:
    tolerance = KERNEL[layer.dtype]
    expected_memory, actual_memory = copy_of(memory), copy_of(memory)
    actual, expected = (
        ops.causal_conv(x_TC, *weights(layer, bias=bias), own, group, silu=layer.taps != 3)
        for ops, own in ((cpu, actual_memory), (reference, expected_memory))
    )
    assert actual.dtype == expected.dtype == x_TC.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_same_memory(actual_memory, expected_memory, tolerance)


@pytest.fixture(params=["host", "device"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with slices where possible, and as on a device: by ids alone."""
    monkeypatch.setattr(kernel_rows, "on_host", lambda ids: request.param == "host")


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("pending", [False, True], ids=["clean", "pending"])
@pytest.mark.parametrize("recorded", [False, True], ids=["certain", "recorded"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 7, 63])
def test_chain_equals_reference(width: int, taps: int, rows: int, recorded: bool, pending: bool) -> None:
    layer = Layer(taps=taps)
    memory, paths = start(layer, rows, pending=pending)
    records = in_order(rows, width) if recorded else None
    group = build_group([chain(width)] * rows, SLOTS[rows], paths=paths, records=records, conv_taps=taps)
    # Inputs are columns of a wider projection, as in a layer.
    x_TC = noise(rows * width, layer.channels + 3)[:, 2:-1]
    assert_equals_reference(x_TC, layer, memory, group, bias=bool(width % 2))


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("pending", [False, True], ids=["clean", "pending"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize(("kind", "width"), [("star", 7), ("random", 16), ("random", 63)])
def test_tree_equals_reference(kind: str, width: int, taps: int, rows: int, pending: bool) -> None:
    layer = Layer(taps=taps)
    memory, paths = start(layer, rows, pending=pending)
    trees = [draw(kind, width, seed) for seed in range(rows)]
    records = scattered(rows, width, seed=9)
    group = build_group(trees, SLOTS[rows], paths=paths, records=records, conv_taps=taps)
    assert_equals_reference(noise(rows * width, layer.channels), layer, memory, group, bias=True)


@pytest.mark.parametrize("tile", [1, 1 << 19])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 5, 64, 65, 130])
def test_float32_chain_equals_reference(
    width: int, rows: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long float32 chains use a different algorithm, in tiles."""
    monkeypatch.setattr(cpu, "TILE", tile)
    layer = Layer(dtype=torch.float32)
    group = build_group([chain(width)] * rows, SLOTS[rows])
    x_TC = noise(rows * width, layer.channels, dtype=layer.dtype)
    assert_equals_reference(x_TC, layer, make_memory(layer, SLOTS[rows]), group, bias=True)


@pytest.mark.parametrize("width", [1, 9, 40])
def test_bfloat16_is_summed_in_float32_and_rounded_before_silu(width: int) -> None:
    layer = Layer(dtype=torch.float32)
    memory = RecurrentMemory(*(x.bfloat16() for x in make_memory(layer, SLOTS[1])))
    weight_CK, bias_C = weights(layer, bias=True)
    group = build_group([chain(width)], SLOTS[1])
    x_TC = noise(width, layer.channels).bfloat16()
    known_NC = torch.cat([memory.window_SIC[4], x_TC]).double()
    exact_CT = F.conv1d(known_NC.T, weight_CK.double()[:, None], bias_C.double(), groups=layer.channels)
    actual = cpu.causal_conv(x_TC, weight_CK, bias_C, memory, group)
    assert actual.dtype == torch.bfloat16
    share = (actual == F.silu(exact_CT.T.bfloat16())).float().mean()
    assert share >= BFLOAT16_EQUAL > (actual == F.silu(exact_CT.T).bfloat16()).float().mean()


@pytest.mark.parametrize("slots", [(3, 4, 5), (5, 4, 3), (1, 8, 2)], ids=str)
def test_slots_in_any_order(slots: tuple[int, ...]) -> None:
    layer = Layer()
    group = build_group([chain(2)] * 3, slots)
    assert_equals_reference(noise(6, layer.channels), layer, make_memory(layer, slots), group, bias=False)


@pytest.mark.parametrize("layout", ["CK", "KC"])
def test_weights_in_either_layout(layout: str) -> None:
    layer, group = Layer(dtype=torch.float32), build_group([chain(40)], SLOTS[1])
    weight_CK, _ = weights(layer, bias=False)
    laid_CK = weight_CK if layout == "CK" else weight_CK.t().contiguous().t()
    x_TC = noise(40, layer.channels, dtype=layer.dtype)
    expected = reference.causal_conv(x_TC, weight_CK, None, make_memory(layer, SLOTS[1]), group)
    actual = cpu.causal_conv(x_TC, laid_CK, None, make_memory(layer, SLOTS[1]), group)
    torch.testing.assert_close(actual, expected, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)


@pytest.mark.parametrize("ops", [reference, cpu])
@pytest.mark.parametrize("node", range(7))
def test_promoting_a_node_equals_feeding_its_path(ops: ModuleType, node: int) -> None:
    layer, tree = Layer(), random_tree(7, seed=node)
    x_TC, following = noise(7, layer.channels), noise(3, layer.channels, seed=8)
    path, records = path_to(tree, node), scattered(1, 7, seed=1)
    weight_CK, bias_C = weights(layer, bias=True)

    taken_back, fed = make_memory(layer, SLOTS[1]), make_memory(layer, SLOTS[1])
    ops.causal_conv(x_TC, weight_CK, bias_C, taken_back, build_group([tree], SLOTS[1], records=records))
    accepted = [[records[0][i] for i in path]]
    group = build_group([chain(3)], SLOTS[1], paths=accepted)
    actual = ops.causal_conv(following, weight_CK, bias_C, taken_back, group)

    ops.causal_conv(x_TC[path], weight_CK, bias_C, fed, build_group([chain(len(path))], SLOTS[1]))
    expected = ops.causal_conv(following, weight_CK, bias_C, fed, build_group([chain(3)], SLOTS[1]))
    torch.testing.assert_close(actual, expected, rtol=KERNEL_FLOAT64, atol=KERNEL_FLOAT64)
    assert torch.equal(taken_back.window_SIC[4], fed.window_SIC[4])


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "mutant"])
def test_stale_record_in_a_path_is_noticed(wrong: bool) -> None:
    layer = Layer()
    memory, paths = with_pending(layer, 1)
    expected_memory, x_TC = copy_of(memory), noise(1, layer.channels, seed=8)
    group = build_group([chain(1)], SLOTS[1], paths=paths)
    expected = reference.causal_conv(x_TC, *weights(layer, bias=False), expected_memory, group)
    if wrong:
        paths = [[paths[0][0], scattered(1, 6, seed=5)[0][4]]]
    group = build_group([chain(1)], SLOTS[1], paths=paths)
    actual = cpu.causal_conv(x_TC, *weights(layer, bias=False), memory, group)
    assert torch.allclose(actual, expected, atol=KERNEL_FLOAT64) is not wrong
    assert torch.equal(memory.window_SIC[4], expected_memory.window_SIC[4]) is not wrong


def nodes_that_differ_from_their_paths(tree: Parents, layer: Layer, group: Group) -> list[int]:
    memory, x_TC = make_memory(layer, SLOTS[1]), noise(len(tree), layer.channels)
    actual = cpu.causal_conv(x_TC, *weights(layer, bias=True), copy_of(memory), group)
    wrong = []
    for node in range(len(tree)):
        path = path_to(tree, node)
        alone = build_group([chain(len(path))], SLOTS[1])
        expected = cpu.causal_conv(x_TC[path], *weights(layer, bias=True), copy_of(memory), alone)[-1]
        if not torch.allclose(actual[node], expected, atol=KERNEL_FLOAT64):
            wrong.append(node)
    return wrong


def test_every_node_equals_its_path_as_a_chain() -> None:
    tree = random_tree(16, seed=8)
    group = build_group([tree], SLOTS[1], records=in_order(1, 16))
    assert nodes_that_differ_from_their_paths(tree, Layer(), group) == []


def test_a_swapped_parent_is_noticed() -> None:
    tree = random_tree(16, seed=8)
    other = (*tree[:9], tree[9] - 1, *tree[10:])
    group = build_group([tree], SLOTS[1], records=in_order(1, 16))
    wrong = replace(group, tap_BMC=build_group([other], SLOTS[1]).tap_BMC)
    assert 9 in nodes_that_differ_from_their_paths(tree, Layer(), wrong)


@pytest.mark.parametrize("ops", [reference, cpu])
def test_fold_gives_the_window_at_any_accepted_position(ops: ModuleType) -> None:
    layer = Layer()
    memory, _ = with_pending(layer, 3)
    records = scattered(3, 6, seed=5)
    path = RecordIds(*(torch.tensor([[at[n] for at in row] for row in records]) for n in range(2)))
    before = memory.window_SIC.clone()
    lengths = [0, 2, 5]
    ops.fold_window(memory, torch.tensor(SLOTS[3]), path, torch.tensor(lengths))
    for b, length in enumerate(lengths):
        inputs = [memory.input_SRC[at] for at in records[b][:length]]
        expected = torch.stack([*before[SLOTS[3][b]], *inputs])[-(layer.taps - 1) :]
        assert torch.equal(memory.window_SIC[SLOTS[3][b]], expected)
