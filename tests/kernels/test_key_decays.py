"""Recurrences with per-key decays, in every kernel, against the reference."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.native import compiled, recurrent
from specdec.kernels.recurrence import cpu, reference, triton
from tests.kernels.interpreter import poison
from tests.kernels.tokens import SLOTS, Tokens, draw_tokens, keys_of, run, start
from tests.kernels.trees import (
    Layer,
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
    snapshot_slots,
)
from tests.tolerances import KERNEL

FORMS = [
    pytest.param(cpu, torch.float64),
    pytest.param(
        *(recurrent, torch.float32),
        marks=pytest.mark.skipif(compiled.compiled() is None, reason="there is no C compiler"),
    ),
]


def layer_of(dtype: torch.dtype, **sizes: int) -> Layer:
    return Layer(**{"groups": 2, "heads": 2, "key": 37, "value": 35, **sizes}, dtype=dtype, by_key=True)


def name(form: Any) -> str | None:
    return form.__name__.removeprefix("specdec.kernels.") if isinstance(form, ModuleType) else None


def group_of(kind: str, width: int, backing: str, rows: int, paths: Any) -> Group:
    return build_group(
        [draw(kind, width, seed) for seed in range(rows)],
        SLOTS[rows],
        paths=paths,
        records=scattered(rows, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(rows, width, SLOTS[rows]) if backing == "snapshot" else None,
    )


def assert_equals_reference(
    ops: ModuleType, tokens: Tokens, memory: RecurrentMemory, group: Group, k_path: Tensor | None = None
) -> None:
    expected_memory, actual_memory = copy_of(memory), copy_of(memory)
    actual = run(ops, tokens, actual_memory, group, k_path)
    expected = run(reference, tokens, expected_memory, group, k_path)
    tolerance = KERNEL[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_same_memory(actual_memory, expected_memory, tolerance)


@pytest.mark.parametrize(
    ("kind", "width", "backing", "pending", "rows", "delta"),
    [
        ("chain", 1, "certain", True, 3, True),
        ("chain", 1, "record", False, 3, True),
        ("chain", 5, "certain", True, 1, True),
        ("random", 7, "record", True, 3, True),
        ("random", 7, "record", True, 1, False),
        ("star", 8, "record", False, 1, True),
        ("random", 24, "record", True, 1, True),
        ("random", 63, "record", True, 1, True),
        ("chain", 33, "record", True, 1, True),
        ("chain", 35, "certain", True, 3, True),
        ("chain", 33, "certain", False, 1, False),
        ("chain", 3, "snapshot", False, 1, True),
        ("random", 9, "snapshot", False, 3, False),
    ],
)
@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_window_equals_reference(
    kind: str, width: int, backing: str, pending: bool, rows: int, delta: bool, ops: ModuleType, dtype: Any
) -> None:
    layer = layer_of(dtype)
    memory, paths, k_path = start(layer, rows, delta=delta, pending=pending)
    group = group_of(kind, width, backing, rows, paths)
    assert_equals_reference(ops, draw_tokens(layer, rows * width, delta=delta), memory, group, k_path)


@pytest.mark.parametrize(
    ("kind", "width", "backing"),
    [("chain", 40, "certain"), ("random", 8, "record"), ("random", 24, "record"), ("random", 63, "record")],
)
@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_strong_decays_stay_finite_and_exact(
    kind: str, width: int, backing: str, ops: ModuleType, dtype: Any
) -> None:
    """Each key has its own, from 0 down to -30: the sums along a path fall to -900."""
    layer = layer_of(dtype)
    tokens = draw_tokens(layer, width)
    strong = -30 * torch.rand(tokens.decay.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    strong[::3] *= 1e-3
    group = group_of(kind, width, backing, 1, None)
    assert_equals_reference(ops, replace(tokens, decay=strong), make_memory(layer, SLOTS[1]), group)


@pytest.mark.parametrize(
    ("kind", "width", "backing", "rows"),
    [
        ("chain", 1, "certain", 3),
        ("chain", 3, "certain", 1),
        ("random", 7, "record", 1),
        ("random", 18, "record", 1),
        ("chain", 18, "certain", 1),
        ("random", 4, "snapshot", 1),
    ],
)
def test_window_on_a_gpu_equals_reference(
    kind: str, width: int, backing: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter, with decays down to -30 and columns that fill no block."""
    poison(monkeypatch)
    layer = layer_of(torch.float32, groups=1, heads=2, key=17, value=9)
    memory, paths, k_path = start(layer, rows, delta=True, pending=backing != "snapshot")
    tokens = draw_tokens(layer, rows * width)
    tokens.decay[::2] *= 10
    assert_equals_reference(triton, tokens, memory, group_of(kind, width, backing, rows, paths), k_path)


@pytest.mark.parametrize("width", [1, 5, 20])
@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_key_heads_may_serve_several_heads_and_inputs_be_columns(
    width: int, ops: ModuleType, dtype: Any
) -> None:
    layer = layer_of(dtype, heads=4, key=6, value=5)
    memory, paths, k_path = start(layer, 3, delta=True, pending=True)
    tokens = draw_tokens(layer, 3 * width).map(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]])
    assert_equals_reference(ops, tokens, memory, group_of("chain", width, "certain", 3, paths), k_path)


@pytest.mark.parametrize("width", [3, 20])
@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_the_same_decay_in_all_keys_is_the_gated_delta_rule(width: int, ops: ModuleType, dtype: Any) -> None:
    layer, plain = layer_of(dtype), replace(layer_of(dtype), by_key=False)
    tokens, group = draw_tokens(plain, width), group_of("random", width, "record", 1, None)
    by_key = tokens.decay[..., None].expand(-1, -1, layer.key).contiguous()
    actual = run(ops, replace(tokens, decay=by_key), make_memory(layer, SLOTS[1]), group)
    expected = run(ops, tokens, make_memory(plain, SLOTS[1]), group)
    torch.testing.assert_close(actual, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_every_node_equals_its_path_and_a_wrong_ancestor_is_noticed(ops: ModuleType, dtype: Any) -> None:
    layer, tree = layer_of(dtype), random_tree(16, seed=8)
    tokens, memory = draw_tokens(layer, 16), make_memory(layer, SLOTS[1])
    group = build_group([tree], SLOTS[1], records=in_order(1, 16))
    right, alone = run(ops, tokens, copy_of(memory), group), {}
    for node in range(15, 0, -3):
        path = path_to(tree, node)
        own = build_group([chain(len(path))], SLOTS[1])
        alone[node] = run(ops, tokens.pick(path), copy_of(memory), own)[-1]
        assert torch.allclose(right[node], alone[node], rtol=KERNEL[dtype], atol=KERNEL[dtype])
    assert group.ancestors_BMM is not None
    for node, expected in alone.items():
        mutant = group.ancestors_BMM.clone()
        mutant[0, node, path_to(tree, node)[-2]] ^= True
        found = run(ops, tokens, copy_of(memory), replace(group, ancestors_BMM=mutant))[node]
        assert not torch.allclose(found, expected, rtol=KERNEL[dtype], atol=KERNEL[dtype])


@pytest.mark.parametrize(("ops", "dtype"), FORMS, ids=name)
def test_accepted_nodes_equal_tokens_that_were_fed(ops: ModuleType, dtype: Any) -> None:
    """Rejected branches affect no bit of the state; siblings may be in any order."""
    layer, tree, path = layer_of(dtype), (-1, 0, 0, 1, 2, 3, 2), [0, 2, 6]
    tokens, memory = draw_tokens(layer, 7), make_memory(layer, SLOTS[1])
    other, k_path, found = draw_tokens(layer, 7, seed=77), keys_of(tokens, [path], 7), []
    rejected = [node for node in range(7) if node not in path]
    disturbed = replace(tokens, v=tokens.v.clone(), decay=tokens.decay.clone())
    disturbed.v[rejected], disturbed.decay[rejected] = other.v[rejected], other.decay[rejected]
    order = [0, 2, 1, 6, 4, 5, 3]
    moved = tuple(order.index(tree[node]) if node else -1 for node in order)
    for inputs, nodes, parents in ((tokens, path, tree), (disturbed, path, tree), (tokens, [0, 1, 3], moved)):
        own = copy_of(memory)
        records = in_order(1, 7)
        inputs = inputs if parents is tree else inputs.pick(order)
        run(ops, inputs, own, build_group([parents], SLOTS[1], records=records))
        accepted = RecordIds(*(torch.tensor([[records[0][n][i] for n in nodes]]) for i in range(2)))
        ops.fold(own, torch.tensor(SLOTS[1]), accepted, torch.tensor([len(path)]), k_path)
        found.append(own.state_SHKW[4].clone())
    assert torch.equal(found[0], found[1])
    fed, expected = copy_of(memory), copy_of(memory)
    run(ops, tokens.pick(path), fed, build_group([chain(3)], SLOTS[1]))
    run(reference, tokens.pick(path), expected, build_group([chain(3)], SLOTS[1]))
    for state in (found[0], found[2], fed.state_SHKW[4]):
        torch.testing.assert_close(state, expected.state_SHKW[4], rtol=KERNEL[dtype], atol=KERNEL[dtype])
