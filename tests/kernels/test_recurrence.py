"""A window's recurrence against its tokens one by one, and its independence of rejected tokens."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from specdec.kernels import rows as kernel_rows
from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.recurrence import cpu, reference, states
from tests.kernels.tokens import SLOTS, Tokens, draw_tokens, keys_of, run, start, with_pending
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
from tests.tolerances import KERNEL_FLOAT32, KERNEL_FLOAT64


def close(actual: Tensor, expected: Tensor, tolerance: float = KERNEL_FLOAT64) -> bool:
    return torch.allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_equals_reference(
    tokens: Tokens, memory: RecurrentMemory, group: Group, tolerance: float, k_path: Tensor | None = None
) -> None:
    expected_memory, actual_memory = copy_of(memory), copy_of(memory)
    actual = run(cpu, tokens, actual_memory, group, k_path)
    expected = run(reference, tokens, expected_memory, group, k_path)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_same_memory(actual_memory, expected_memory, tolerance)


@pytest.fixture(params=["gathered", "in place", "device"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with states gathered, with states processed in place row by row, and by ids as on a device."""
    monkeypatch.setattr(states, "LARGE", 0 if request.param == "in place" else 1 << 40)
    for module in (kernel_rows, states):
        monkeypatch.setattr(module, "on_host", lambda ids: request.param != "device")


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("pending", [False, True], ids=["clean", "pending"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("kind", "width"),
    [("chain", 1), ("chain", 2), ("chain", 7), ("star", 7), ("random", 16), ("random", 63), ("chain", 64)],
)
def test_recorded_window_equals_reference(
    kind: str, width: int, rows: int, delta: bool, pending: bool
) -> None:
    ratio = 1 + width % 3
    layer = Layer(heads=2 * ratio)
    memory, paths, k_path = start(layer, rows, delta=delta, pending=pending)
    # Half the cases write their records side by side, in slabs that the path does not use.
    records = scattered(rows, width, seed=9) if width % 2 else in_order(rows, width)
    trees = [draw(kind, width, seed) for seed in range(rows)]
    group = build_group(trees, SLOTS[rows], paths=paths, records=records)
    tokens = draw_tokens(layer, rows * width, delta=delta)
    assert_equals_reference(tokens, memory, group, KERNEL_FLOAT64, k_path)


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("pending", [False, True], ids=["clean", "pending"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mamba2"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 2, 7, 16, 63, 64, 65, 130])
def test_certain_window_equals_reference(width: int, rows: int, delta: bool, pending: bool) -> None:
    ratio = 1 + width % 3
    layer = Layer(heads=2 * ratio)
    memory, paths, k_path = start(layer, rows, delta=delta, pending=pending)
    group = build_group([chain(width)] * rows, SLOTS[rows], paths=paths)
    tokens = draw_tokens(layer, rows * width, delta=delta)
    assert_equals_reference(tokens, memory, group, KERNEL_FLOAT64, k_path)


@pytest.mark.parametrize("slots", [(3, 4, 5), (5, 4, 3), (1, 8, 2)], ids=str)
@pytest.mark.parametrize("width", [1, 5])
def test_slots_in_any_order(slots: tuple[int, ...], width: int) -> None:
    layer = Layer()
    group = build_group([chain(width)] * 3, slots)
    assert_equals_reference(draw_tokens(layer, 3 * width), make_memory(layer, slots), group, KERNEL_FLOAT64)


@pytest.mark.parametrize("width", [1, 5, 70])
@pytest.mark.parametrize("row_count", [1, 3])
def test_inputs_may_be_columns_of_a_projection(width: int, row_count: int) -> None:
    layer, slots = Layer(), SLOTS[row_count]
    tokens = draw_tokens(layer, row_count * width)
    columns = tokens.map(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]])
    group = build_group([chain(width)] * row_count, slots)
    assert_equals_reference(columns, make_memory(layer, slots), group, KERNEL_FLOAT64)


@pytest.mark.parametrize("width", [1, 8, 130])
@pytest.mark.parametrize("ratio", [1, 2])
def test_float32_stays_near_float64(width: int, ratio: int) -> None:
    layer = Layer(heads=2 * ratio, key=33, value=31, dtype=torch.float32)
    memory = make_memory(layer, SLOTS[3])
    group = build_group([chain(width)] * 3, SLOTS[3])
    assert_equals_reference(draw_tokens(layer, 3 * width), memory, group, KERNEL_FLOAT32)


def test_output_has_the_queries_dtype_and_computes_in_the_states() -> None:
    layer = Layer(dtype=torch.float32)
    tokens = draw_tokens(layer, 3).map(torch.Tensor.bfloat16)
    memory = make_memory(layer, SLOTS[1])
    group = build_group([chain(3)], SLOTS[1])
    wide = run(cpu, tokens.map(torch.Tensor.float), copy_of(memory), group)
    narrow = run(cpu, tokens, memory, group)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("ops", [reference, cpu])
@pytest.mark.parametrize("node", range(7))
def test_promoting_a_node_equals_feeding_its_path(ops: ModuleType, node: int) -> None:
    """With all but one path of a recorded tree rejected, outputs and state are those without drafts."""
    layer, tree = Layer(), random_tree(7, seed=node)
    tokens, following = draw_tokens(layer, 7), draw_tokens(layer, 3, seed=2)
    path = path_to(tree, node)
    taken_back, fed = make_memory(layer, SLOTS[1]), make_memory(layer, SLOTS[1])

    records = scattered(1, 7, seed=1)
    run(ops, tokens, taken_back, build_group([tree], SLOTS[1], records=records))
    accepted = [[records[0][i] for i in path]]
    group = build_group([chain(3)], SLOTS[1], paths=accepted)
    actual = run(ops, following, taken_back, group, keys_of(tokens, [path], 7))

    run(ops, tokens.pick(path), fed, build_group([chain(len(path))], SLOTS[1]))
    expected = run(ops, following, fed, build_group([chain(3)], SLOTS[1]))
    assert close(actual, expected)
    assert close(taken_back.state_SHKW[4], fed.state_SHKW[4])


def test_new_records_may_replace_the_pending_ones() -> None:
    layer, tokens = Layer(), draw_tokens(Layer(), 9)
    memory, paths, k_path = with_pending(layer, 1)
    group = build_group([chain(9)], SLOTS[1], paths=paths, records=scattered(1, 9, seed=5))
    assert_equals_reference(tokens, memory, group, KERNEL_FLOAT64, k_path)
    in_a_row = make_memory(layer, SLOTS[1])
    run(cpu, tokens, in_a_row, build_group([chain(9)], SLOTS[1], records=in_order(1, 9)))
    group = build_group([chain(9)], SLOTS[1], paths=in_order(1, 4), records=in_order(1, 9))
    assert_equals_reference(tokens, in_a_row, group, KERNEL_FLOAT64, keys_of(tokens, [range(4)], 9))


def test_adjacent_slots_in_different_slabs_are_no_slice() -> None:
    layer, records = Layer(), [[(1 + i % 2, 3 + i) for i in range(4)]]
    memory = make_memory(layer, SLOTS[1])
    group = build_group([chain(4)], SLOTS[1], records=records)
    assert_equals_reference(draw_tokens(layer, 4), memory, group, KERNEL_FLOAT64)


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "mutant"])
def test_stale_record_in_a_path_is_noticed(wrong: bool) -> None:
    layer = Layer()
    memory, paths, k_path = with_pending(layer, 1)
    expected_memory, following = copy_of(memory), draw_tokens(layer, 2)
    group = build_group([chain(2)], SLOTS[1], paths=paths)
    expected = run(reference, following, expected_memory, group, k_path)
    if wrong:
        records = scattered(1, 9, seed=5)[0]
        stale = next(record for record in records if record not in paths[0])
        paths = [[stale, *paths[0][1:]]]
    actual = run(cpu, following, memory, build_group([chain(2)], SLOTS[1], paths=paths), k_path)
    assert close(actual, expected) is not wrong
    assert close(memory.state_SHKW[4], expected_memory.state_SHKW[4]) is not wrong


def nodes_that_differ_from_their_paths(
    tree: Parents, tokens: Tokens, layer: Layer, group: Group
) -> list[int]:
    memory = make_memory(layer, SLOTS[1])
    actual = run(cpu, tokens, copy_of(memory), group)
    wrong = []
    for node in range(len(tree)):
        path = path_to(tree, node)
        alone = run(cpu, tokens.pick(path), copy_of(memory), build_group([chain(len(path))], SLOTS[1]))
        if not close(actual[node], alone[-1]):
            wrong.append(node)
    return wrong


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "mamba2"])
def test_every_node_equals_its_path_as_a_chain(delta: bool) -> None:
    layer, tree = Layer(), random_tree(16, seed=8)
    tokens = draw_tokens(layer, 16, delta=delta)
    group = build_group([tree], SLOTS[1], records=in_order(1, 16))
    assert nodes_that_differ_from_their_paths(tree, tokens, layer, group) == []


def test_one_wrong_ancestor_is_noticed() -> None:
    layer, tree = Layer(), random_tree(16, seed=8)
    tokens = draw_tokens(layer, 16)
    group = build_group([tree], SLOTS[1], records=in_order(1, 16))
    assert group.ancestors_BMM is not None
    for i, j in [(15, 3), (6, 2), (9, 0)]:
        mutant = group.ancestors_BMM.clone()
        mutant[0, i, j] ^= True
        wrong = replace(group, ancestors_BMM=mutant)
        assert i in nodes_that_differ_from_their_paths(tree, tokens, layer, wrong)


def test_permuting_siblings_permutes_outputs() -> None:
    layer, tree = Layer(), (-1, 0, 0, 0, 1, 1, 3, 4)
    order = [0, 3, 1, 2, 6, 5, 4, 7]
    moved = tuple(order.index(tree[i]) if i else -1 for i in order)
    tokens = draw_tokens(layer, 8)
    first, second = make_memory(layer, SLOTS[1]), make_memory(layer, SLOTS[1])
    expected = run(cpu, tokens, first, build_group([tree], SLOTS[1], records=in_order(1, 8)))
    group = build_group([moved], SLOTS[1], records=in_order(1, 8))
    actual = run(cpu, tokens.pick(order), second, group)
    assert close(actual, expected[order])
    assert close(second.update_SRHW[1, 3:11], first.update_SRHW[1, 3:11][order])


def test_rejected_branches_cannot_change_the_state() -> None:
    layer, tree, path = Layer(), (-1, 0, 0, 1, 2, 3, 2), [0, 2, 6]
    tokens, other = draw_tokens(layer, 7), draw_tokens(layer, 7, seed=77)
    rejected = [i for i in range(7) if i not in path]

    def swap(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[rejected] = y[rejected]
        return x

    assert tokens.beta is not None and other.beta is not None
    disturbed = Tokens(
        swap(tokens.q, other.q),
        swap(tokens.k, other.k),
        swap(tokens.v, other.v),
        swap(tokens.decay, other.decay),
        swap(tokens.beta, other.beta),
    )
    states_after, records = [], in_order(1, 7)
    for inputs in (tokens, disturbed):
        memory = make_memory(layer, SLOTS[1])
        run(cpu, inputs, memory, build_group([tree], SLOTS[1], records=records))
        accepted = build_group([chain(1)], SLOTS[1], paths=[[records[0][i] for i in path]])
        k_path = keys_of(inputs, [path], 7)
        cpu.fold(memory, accepted.state_B, accepted.path, accepted.path_length_B, k_path)
        states_after.append(memory.state_SHKW[4])
    assert torch.equal(*states_after)


@pytest.mark.parametrize("width", [5, 64, 130])
@pytest.mark.parametrize("decays", [(-80.0,), (-80.0, -1e-3, -1e-3), (-30.0, 0.0)], ids=str)
def test_strong_decays_stay_finite_and_exact(width: int, decays: tuple[float, ...]) -> None:
    """G falls to -10400 here; float32 differences of it would be off by 5e-4."""
    layer = Layer(dtype=torch.float32)
    tokens = draw_tokens(layer, width)
    strong = torch.tensor(decays).repeat(width)[:width, None].expand(-1, layer.heads).contiguous()
    group = build_group([chain(width)], SLOTS[1])
    assert_equals_reference(
        replace(tokens, decay=strong), make_memory(layer, SLOTS[1]), group, KERNEL_FLOAT32
    )


def test_strong_decays_in_trees_stay_finite() -> None:
    layer = Layer(dtype=torch.float32)
    tokens = draw_tokens(layer, 16)
    strong = torch.where(tokens.decay < -0.5, -80.0, tokens.decay)
    group = build_group([random_tree(16, seed=2)], SLOTS[1], records=in_order(1, 16))
    assert_equals_reference(
        replace(tokens, decay=strong), make_memory(layer, SLOTS[1]), group, KERNEL_FLOAT32
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ops", [reference, cpu])
def test_fold_gives_the_state_at_any_accepted_position(ops: ModuleType, rows: int) -> None:
    layer = Layer()
    memory, _, _ = with_pending(layer, rows)
    k_path = draw_tokens(layer, rows * 9, seed=3).k.unflatten(0, (rows, 9))
    memory.input_SRC.copy_(torch.randn(memory.input_SRC.shape, dtype=layer.dtype))
    records = scattered(rows, 9, seed=5)
    paths = RecordIds(*(torch.tensor([[at[n] for at in row] for row in records]) for n in range(2)))
    for lengths in ([0] * rows, [2] * rows, [4, 0, 1][:rows]):
        actual, expected = copy_of(memory), copy_of(memory)
        ops.fold(actual, torch.tensor(SLOTS[rows]), paths, torch.tensor(lengths), k_path)
        for b, length in enumerate(lengths):
            slot = torch.tensor(SLOTS[rows][b : b + 1])
            own = RecordIds(paths.slab_BN[b : b + 1, :length], paths.index_BN[b : b + 1, :length])
            reference.fold(expected, slot, own, torch.tensor([length]), k_path[b : b + 1])
        assert_same_memory(actual, expected, KERNEL_FLOAT64)


@pytest.mark.parametrize("ops", [reference, cpu])
def test_fold_of_a_convolution_alone(ops: ModuleType) -> None:
    layer = Layer(groups=0, heads=0)
    memory = make_memory(layer, SLOTS[1])
    memory.input_SRC[2, 5] = 1.5
    path = RecordIds(torch.tensor([[2]]), torch.tensor([[5]]))
    ops.fold(memory, torch.tensor(SLOTS[1]), path, torch.tensor([1]), None)
    assert bool((memory.window_SIC[4, -1] == 1.5).all())


def test_chunks_of_a_prompt_equal_the_whole() -> None:
    layer = Layer()
    tokens = draw_tokens(layer, 130)
    whole, parts = make_memory(layer, SLOTS[1]), make_memory(layer, SLOTS[1])
    expected = run(cpu, tokens, whole, build_group([chain(130)], SLOTS[1]))
    actual, start = [], 0
    for width in (1, 3, 7, 64, 55):
        piece = tokens.pick(range(start, start + width))
        actual.append(run(cpu, piece, parts, build_group([chain(width)], SLOTS[1])))
        start += width
    assert close(torch.cat(actual), expected)
    assert close(parts.state_SHKW[4], whole.state_SHKW[4])
