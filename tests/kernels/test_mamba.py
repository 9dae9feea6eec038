"""Mamba-2 between its projections: every kernel against the reference, window memory and rollback."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.mamba import triton
from specdec.kernels.mamba.composed import CPU as cpu
from specdec.kernels.mamba.composed import REFERENCE as reference
from specdec.kernels.mamba.layer import MambaLayer
from specdec.kernels.native import compiled, recurrent
from specdec.kernels.recurrence.triton import fold
from tests.kernels.interpreter import poison
from tests.kernels.trees import (
    Layer,
    Parents,
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
SMALL, WIDE = (2, 4, 6, 9), (2, 4, 33, 17)
"""Groups, heads, state and head dims; the wide one's x, and its B and C, take two tiles each."""
FORMS = {"cpu": cpu, "triton": triton} | ({"native": recurrent.MAMBA} if compiled.compiled() else {})
forms = pytest.mark.parametrize("ops", FORMS.values(), ids=FORMS)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_layer(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int] = SMALL,
    limit: tuple[float, float] = (1e-3, math.inf),
    slots: Sequence[int] = SLOTS[3],
    *,
    bias: bool = True,
    norm: str = "of gated",
) -> tuple[MambaLayer, RecurrentMemory]:
    """Draw a layer with slow decays and its memory; states are at least float32, inputs in its dtype."""
    groups, heads, key, value = sizes
    channels = heads * value + 2 * groups * key
    wide_norm = norm == "before gate" and dtype == torch.bfloat16
    norm_dtype = torch.float32 if wide_norm else dtype
    layer = MambaLayer(
        *sizes,
        conv_CK=noise(4, channels, seed=2).t(),
        conv_C=noise(channels, dtype=dtype, seed=3) if bias else None,
        A_H=-torch.exp(noise(heads, seed=4) - 2),
        D_H=noise(heads, seed=5),
        dt_bias_H=noise(heads, seed=6),
        step_limit=limit,
        norm_N=None if norm == "none" else noise(heads * value, dtype=norm_dtype, seed=7),
        eps=1e-5,
        gate_first=norm == "of gated",
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    memory = make_memory(Layer(groups, heads, key, value, channels=channels, dtype=wide), slots)
    return layer, with_inputs(memory, dtype)


def project(layer: MambaLayer, tokens: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Draw a projection's output, as columns of a wider tensor; step sizes vary widely."""
    drawn = noise(tokens, sum(layer.widths) + 16, dtype=dtype, seed=seed)[:, 16:]
    drawn[:, -layer.heads :] *= 3
    return drawn


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = KERNEL[expected.dtype]
    assert found.dtype == expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_same(actual: RecurrentMemory, expected: RecurrentMemory, dtype: torch.dtype) -> None:
    """Inputs are copied; updates and states are sums of values rounded to the model's dtype."""
    assert_same_memory(actual, expected, KERNEL[dtype])
    for x, y in ((actual.window_SIC, expected.window_SIC), (actual.input_SRC, expected.input_SRC)):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def verify(
    layer: MambaLayer, memory: RecurrentMemory, rows: int, dtype: torch.dtype
) -> list[list[tuple[int, int]]]:
    """Record six tokens per row, and return the records of each row's accepted path."""
    records = scattered(rows, 6, seed=5)
    group = build_group([chain(6)] * rows, SLOTS[rows], records=records)
    reference.mamba(project(layer, 6 * rows, dtype, seed=7), layer, memory, group)
    return [own[:length] for own, length in zip(records, [2, 0, 5], strict=False)]


LAYERS: list[tuple[str, int, str, bool, int, torch.dtype]] = [
    ("chain", 1, "certain", True, 3, torch.bfloat16),
    ("random", 7, "record", True, 3, torch.float32),
    ("random", 9, "record", True, 1, torch.bfloat16),
    ("star", 5, "snapshot", False, 1, torch.bfloat16),
    ("random", 5, "snapshot", False, 1, torch.float32),
    ("chain", 66, "certain", True, 1, torch.float32),
    ("random", 3, "record", True, 1, torch.float64),
]


@pytest.mark.parametrize(
    ("ops", "kind", "width", "backing", "pending", "rows", "dtype"),
    [
        pytest.param(ops, *case, id="-".join(map(str, (name, *case))))
        for name, ops in FORMS.items()
        for case in LAYERS
        if ops is not triton or case[-1] != torch.float64
    ],
)
def test_a_layer_equals_the_reference(
    ops: Any, kind: str, width: int, backing: str, pending: bool, rows: int, dtype: torch.dtype
) -> None:
    # One norm of each kind of layer: they differ only after the recurrence.
    norm = {"certain": "of gated", "snapshot": "none", "record": "before gate" if rows == 3 else "of gated"}
    layer, memory = make_layer(dtype, norm=norm[backing])
    accepted = verify(layer, memory, rows, dtype)
    group = build_group(
        [draw(kind, width, seed) for seed in range(rows)],
        SLOTS[rows],
        paths=accepted if pending else None,
        records=scattered(rows, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(rows, width, SLOTS[rows]) if backing == "snapshot" else None,
    )
    projected_TN, expected_memory = project(layer, rows * width, dtype), copy_of(memory)
    actual = ops.mamba(projected_TN, layer, memory, group)
    close(actual, reference.mamba(projected_TN, layer, expected_memory, group))
    assert_same(memory, expected_memory, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [(0.0, math.inf), (0.1, 0.5)])
def test_tiles_limits_and_a_missing_bias_on_a_gpu(limit: tuple[float, float], dtype: torch.dtype) -> None:
    layer, memory = make_layer(dtype, WIDE, limit, bias=limit[1] == math.inf)
    accepted = verify(layer, memory, 1, dtype)
    group = build_group([draw("random", 5, 1)], SLOTS[1], paths=accepted, records=scattered(1, 5, seed=9))
    projected_TN, expected_memory = project(layer, 5, dtype), copy_of(memory)
    actual = triton.mamba(projected_TN, layer, memory, group)
    close(actual, reference.mamba(projected_TN, layer, expected_memory, group))
    assert_same(memory, expected_memory, dtype)
    steps_MH = memory.decay_SRH[group.record.slab_BN[0], group.record.index_BN[0]] / layer.A_H
    if limit[1] < math.inf:
        assert {*limit} <= {round(step, 3) for step in steps_MH.flatten().tolist()}


@forms
def test_a_prompt_in_chunks_equals_a_prompt(ops: Any) -> None:
    layer, memory = make_layer(torch.float32)
    projected_TN, expected_memory = project(layer, 75, torch.float32), copy_of(memory)
    expected_TN = reference.mamba(projected_TN, layer, expected_memory, build_group([chain(75)], SLOTS[1]))
    pieces = projected_TN.split([67, 3, 1, 4])
    found = [ops.mamba(piece, layer, memory, build_group([chain(len(piece))], SLOTS[1])) for piece in pieces]
    close(torch.cat(found), expected_TN)
    assert_same_memory(memory, expected_memory, KERNEL_FLOAT32)


@pytest.mark.parametrize("width", [1, 5, 9])
@pytest.mark.parametrize("backing", ["certain", "record"])
def test_padding_rows_give_zeros_and_do_not_change_the_dummy(backing: str, width: int) -> None:
    layer, memory = make_layer(torch.bfloat16, slots=(5, 0))
    trees = [draw("random", width, 3) if backing == "record" else chain(width)] * 2
    records = [*scattered(1, width, seed=9), [(0, 0)] * width] if backing == "record" else None
    group = build_group(trees, (5, 0), paths=[[], []], records=records)
    alone = build_group(trees[:1], (5,), paths=[[]], records=records[:1] if records else None)
    projected_TN, expected_memory = project(layer, 2 * width, torch.bfloat16), copy_of(memory)
    found_TN = triton.mamba(projected_TN, layer, memory, group)
    close(found_TN[:width], reference.mamba(projected_TN[:width], layer, expected_memory, alone))
    assert not found_TN[width:].any()
    assert_same(memory, expected_memory, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recomputed_keys_are_bit_identical(dtype: torch.dtype) -> None:
    """Recomputed by the window that folds them, and by a fold alone; rows accepted all, no, and one token."""
    layer, memory = make_layer(dtype)
    records, tree = scattered(3, 5, seed=5), draw("random", 5, 3)
    group, found = build_group([tree] * 3, SLOTS[3], records=records), {}

    def catch(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        found["new"], found["path"] = k, rest[-1]
        return scan_window(q, k, *rest)

    scan_window = triton.scan_window
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "scan_window", catch)
        triton.mamba(project(layer, 15, dtype), layer, memory, group)
        first, nodes = found["new"].view(3, 5, 2, 6), [path_to(tree, 4), [], [0]]
        paths = [[records[b][node] for node in own] for b, own in enumerate(nodes)]
        following = build_group([chain(1)] * 3, SLOTS[3], paths=paths)
        pending = (following.state_B, following.path, following.path_length_B)
        alone = triton.mamba_keys(layer, memory, *pending)
        expected = reference.mamba_keys(layer, memory, *pending)
        triton.mamba(project(layer, 3, dtype), layer, memory, following)
    for b, own in enumerate(nodes):
        close(alone[b, : len(own)], expected[b, : len(own)])
        for k_path in (alone, found["path"]):
            assert torch.equal(k_path[b, : len(own)].float(), first[b, own])


def swap_parent(parents: Parents) -> Parents:
    """Give the last node another parent."""
    parent = parents[-1]
    others = [i for i in range(len(parents) - 1) if i != parent]
    return (*parents[:-1], others[-1])


def taps_of_another(group: Group, other: Group) -> Group:
    return replace(group, tap_BMC=other.tap_BMC)


def ancestors_of_another(group: Group, other: Group) -> Group:
    return replace(group, ancestors_BMM=other.ancestors_BMM)


def as_it_is(group: Group, other: Group) -> Group:
    return group


@pytest.mark.parametrize("change", [as_it_is, taps_of_another, ancestors_of_another])
@pytest.mark.parametrize("backing", ["record", "snapshot"])
def test_a_node_equals_its_path_as_a_chain(backing: str, change: Callable[[Group, Group], Group]) -> None:
    """With a swapped parent, in the convolution or the state alone, it does not."""
    layer, memory = make_layer(torch.float32)
    tree, width = draw("random", 7, 1), 7
    group, other = (
        build_group(
            [own],
            SLOTS[1],
            records=scattered(1, width, seed=9) if backing == "record" else None,
            snapshots=snapshot_slots(1, width, SLOTS[1]) if backing == "snapshot" else None,
        )
        for own in (tree, swap_parent(tree))
    )
    projected_TN, before = project(layer, width, torch.float32), copy_of(memory)
    found_TN = triton.mamba(projected_TN, layer, memory, change(group, other))
    for node in range(width):
        path = path_to(tree, node)
        certain = build_group([chain(len(path))], SLOTS[1])
        alone_TN = reference.mamba(projected_TN[path], layer, copy_of(before), certain)
        same = torch.allclose(found_TN[node], alone_TN[-1], rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)
        assert same == (change is as_it_is or node < width - 1), node


@pytest.mark.parametrize("stale", [None, "update_SRHW", "decay_SRH", "input_SRC"])
@pytest.mark.parametrize("form", ["lazy", "fold"])
def test_accepted_tokens_are_folded_into_the_state(form: str, stale: str | None) -> None:
    """Folding, by a window or alone, equals running the accepted tokens; a stale record does not."""
    layer, memory = make_layer(torch.float32)
    tree, records = draw("random", 6, 2), scattered(1, 6, seed=3)
    path, projected_TN = path_to(tree, 5), project(layer, 6, torch.float32)
    fed = copy_of(memory)
    reference.mamba(projected_TN[path], layer, fed, build_group([chain(len(path))], SLOTS[1]))
    triton.mamba(projected_TN, layer, memory, build_group([tree], SLOTS[1], records=records))
    if stale:
        slab, place = records[0][path[-1]]
        getattr(memory, stale)[slab, place] = 0.5
    following_TN = project(layer, 2, torch.float32, seed=8)
    expected_TN = reference.mamba(following_TN, layer, fed, build_group([chain(2)], SLOTS[1]))
    paths = [[records[0][node] for node in path]]
    lazy, after = (build_group([chain(2)], SLOTS[1], paths=own) for own in (paths, None))
    if form == "fold":
        pending = lazy.state_B, lazy.path, lazy.path_length_B
        fold(memory, *pending, triton.mamba_keys(layer, memory, *pending))
    found_TN = triton.mamba(following_TN, layer, memory, lazy if form == "lazy" else after)
    assert torch.allclose(found_TN, expected_TN, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32) == (stale is None)
