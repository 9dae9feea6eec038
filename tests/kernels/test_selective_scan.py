"""Mamba-1's recurrence: every kernel against the specification, and its independence of rejected tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from specdec.kernels.native import selective as native
from specdec.kernels.native.compiled import compiled
from specdec.kernels.selective_scan import cpu, reference, triton
from specdec.kernels.selective_scan.layer import SelectiveLayer
from tests.kernels.interpreter import poison
from tests.kernels.trees import (
    PLACES,
    SLABS,
    Layer,
    assert_same_memory,
    build_group,
    chain,
    copy_of,
    draw,
    make_memory,
    path_to,
    poisoned,
    random_tree,
    scattered,
    snapshot_slots,
)
from tests.tolerances import KERNEL_FLOAT32, KERNEL_FLOAT64

SLOTS = {1: (4,), 3: (7, 2, 5)}
FORMS = [reference, cpu]
in_c = pytest.param(native, marks=pytest.mark.skipif(compiled() is None, reason="there are no C forms"))


@pytest.fixture(autouse=True)
def outputs_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@dataclass(frozen=True)
class Tokens:
    x: Tensor
    gate: Tensor
    dt: Tensor
    k: Tensor
    q: Tensor

    def pick(self, index: Sequence[int]) -> "Tokens":
        return Tokens(*(x[list(index)] for x in vars(self).values()))


def draw_tokens(layer: Layer, count: int, seed: int = 1) -> Tokens:
    noise = noise_of(layer, seed)
    x, gate, dt = (noise(count, layer.heads, layer.value) for _ in range(3))
    return Tokens(x, gate, 2 * dt, *(noise(count, layer.heads, layer.key) for _ in range(2)))


def noise_of(layer: Layer, seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=layer.dtype)


def weights_of(layer: Layer) -> SelectiveLayer:
    """Draw decays of all strengths: e^{A Δ} goes down to 0."""
    noise = noise_of(layer, 11)
    A_HKW = -torch.exp(2 * noise(layer.heads, layer.key, layer.value))
    D_HW, bias_HW = noise(2, layer.heads, layer.value)
    return SelectiveLayer(A_HKW, D_HW.contiguous(), bias_HW.contiguous() - 1)


def memory_of(layer: Layer, slots: Sequence[int]) -> RecurrentMemory:
    """Make records with a key per head in place of a decay."""
    keys = poisoned((SLABS, PLACES), (layer.heads, layer.key), layer.dtype)
    return make_memory(layer, slots)._replace(decay_SRH=keys)


def run(
    form: Any,
    tokens: Tokens,
    layer: SelectiveLayer,
    memory: RecurrentMemory,
    group: Group,
    x_path: Tensor | None = None,
) -> Tensor:
    out: Tensor = form.selective_scan(*vars(tokens).values(), layer, memory, group, x_path)
    return out


def inputs_of(tokens: Tokens, nodes: Sequence[Sequence[int]], width: int) -> Tensor:
    """Return the inputs [B, P, H, W] of each row's accepted nodes, padded with NaN."""
    x_path = tokens.x.new_full((len(nodes), max(map(len, nodes)), *tokens.x.shape[1:]), torch.nan)
    for b, path in enumerate(nodes):
        x_path[b, : len(path)] = tokens.x[[b * width + node for node in path]]
    return x_path


def start(layer: Layer, weights: SelectiveLayer, rows: int) -> tuple[RecurrentMemory, Any, Tensor]:
    """Verify a window of 9 in every row and accept paths of different lengths, the first of three empty."""
    memory, trees = memory_of(layer, SLOTS[rows]), [random_tree(9, seed) for seed in range(rows)]
    records, tokens = scattered(rows, 9, seed=5), draw_tokens(layer, rows * 9, seed=3)
    run(reference, tokens, weights, memory, build_group(trees, SLOTS[rows], records=records))
    nodes = [path_to(tree, 8 - b) if b or rows == 1 else [] for b, tree in enumerate(trees)]
    paths = [[records[b][i] for i in path] for b, path in enumerate(nodes)]
    return memory, paths, inputs_of(tokens, nodes, 9)


def compare(
    form: Any,
    layer: Layer,
    group: Group,
    memory: RecurrentMemory,
    x_path: Tensor | None,
    tokens: Tokens | None = None,
) -> None:
    """Compare a kernel's output, and every byte of its memory, with the specification."""
    weights, tolerance = weights_of(layer), KERNEL_FLOAT64 if layer.dtype == torch.float64 else KERNEL_FLOAT32
    tokens = tokens or draw_tokens(layer, group.rows * group.width)
    expected_memory, actual_memory = copy_of(memory), copy_of(memory)
    actual = run(form, tokens, weights, actual_memory, group, x_path)
    expected = run(reference, tokens, weights, expected_memory, group, x_path)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert_same_memory(actual_memory, expected_memory, tolerance)


WINDOWS = [("chain", 1), ("chain", 7), ("star", 7), ("random", 16), ("random", 63)]


@pytest.mark.parametrize("form", [cpu, in_c, triton])
@pytest.mark.parametrize("kept", ["record", "snapshot", "certain"])
@pytest.mark.parametrize(("kind", "width"), WINDOWS)
def test_a_window_equals_the_specification(form: Any, kept: str, kind: str, width: int) -> None:
    """One row or three, with or without a pending path, one head or several, strided inputs."""
    if kept == "snapshot" or form is triton:
        width = min(width, 9)  # the memory has a slot for each; the interpreter is slow
    rows, ratio = 1 + 2 * (width % 2), width % 3
    dtype = torch.float64 if form is cpu else torch.float32
    layer = Layer(heads=1 + ratio, key=3 + width % 5, value=33 + ratio if ratio else 64, dtype=dtype)
    memory, paths, x_path = start(layer, weights_of(layer), rows)
    if kept != "record" and kind != "random":
        paths = x_path = None
    if kept == "snapshot":
        paths = x_path = None
    trees = [draw("chain" if kept == "certain" else kind, width, seed) for seed in range(rows)]
    group = build_group(
        trees,
        SLOTS[rows],
        paths=paths,
        records=scattered(rows, width, seed=9) if kept == "record" else None,
        snapshots=snapshot_slots(rows, width, SLOTS[rows]) if kept == "snapshot" else None,
    )
    tokens = draw_tokens(layer, rows * width)
    apart = torch.cat([tokens.x, tokens.gate], dim=1)
    tokens = replace(tokens, x=apart[:, : layer.heads], gate=apart[:, layer.heads :])
    compare(form, layer, group, memory, x_path, tokens)


@pytest.mark.parametrize("form", [*FORMS, in_c, triton])
@pytest.mark.parametrize("node", [0, 3, 6])
def test_promoting_a_node_equals_feeding_its_path(form: Any, node: int) -> None:
    """With all but one path of a tree rejected, later outputs and states are those without drafts."""
    layer = Layer(heads=2, value=5, dtype=torch.float64 if form in FORMS else torch.float32)
    tree, weights = random_tree(7, seed=node), weights_of(layer)
    tokens, following = draw_tokens(layer, 7), draw_tokens(layer, 3, seed=2)
    path, records = path_to(tree, node), scattered(1, 7, seed=1)
    back, folded, fed = (memory_of(layer, SLOTS[1]) for _ in range(3))
    accepted = [[records[0][i] for i in path]]
    for memory in (back, folded):
        run(form, tokens, weights, memory, build_group([tree], SLOTS[1], records=records))
    group = build_group([chain(3)], SLOTS[1], paths=accepted)
    x_path = inputs_of(tokens, [path], 7)
    actual = run(form, following, weights, back, group, x_path)
    assert group.path and group.path_length_B is not None
    form.fold_selective(weights, folded, group.state_B, group.path, group.path_length_B, x_path)
    own = run(form, tokens.pick(path), weights, fed, build_group([chain(len(path))], SLOTS[1]))
    tolerance = KERNEL_FLOAT64 if form in FORMS else KERNEL_FLOAT32
    torch.testing.assert_close(folded.state_SHKW[4], fed.state_SHKW[4], rtol=tolerance, atol=tolerance)
    expected = run(form, following, weights, fed, build_group([chain(3)], SLOTS[1]))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(back.state_SHKW[4], fed.state_SHKW[4], rtol=tolerance, atol=tolerance)
    assert own.isfinite().all()


def test_outputs_are_equal_in_every_window() -> None:
    """In C the bits are equal: as a chain at once, token by token, and as a path of a tree."""
    if compiled() is None:
        pytest.skip("there are no C forms")
    layer = Layer(heads=1, key=16, value=40, dtype=torch.float32)
    weights, tokens = weights_of(layer), draw_tokens(layer, 6)
    memories = [memory_of(layer, SLOTS[1]) for _ in range(3)]
    at_once = run(native, tokens, weights, memories[0], build_group([chain(6)], SLOTS[1]))
    one = build_group([chain(1)], SLOTS[1])
    by_one = torch.cat([run(native, tokens.pick([i]), weights, memories[1], one) for i in range(6)])
    in_tree, tree = tokens.pick([0, 1, 1, 2, 2, 3, 4, 5]), (-1, 0, 0, 1, 2, 4, 5, 6)
    records = scattered(1, 8, seed=1)
    of_tree = run(native, in_tree, weights, memories[2], build_group([tree], SLOTS[1], records=records))
    assert torch.equal(at_once, by_one) and torch.equal(at_once, of_tree[[0, 2, 4, 5, 6, 7]])
    assert torch.equal(memories[0].state_SHKW[4], memories[1].state_SHKW[4])


def test_a_siblings_state_is_noticed() -> None:
    """A mutant: a node continues from the previous one, whatever its parent is."""
    layer = Layer(heads=1, value=33)
    weights, tokens = weights_of(layer), draw_tokens(layer, 7)
    records = scattered(1, 7, seed=1)
    right = build_group([random_tree(7, 0)], SLOTS[1], records=records)
    wrong = replace(right, ancestors_BMM=None, tap_BMC=None)
    outs = [run(cpu, tokens, weights, memory_of(layer, SLOTS[1]), group) for group in (right, wrong)]
    assert not torch.allclose(*outs)


def test_the_dummy_row_changes_nothing_and_gives_zero() -> None:
    """On a GPU the dummy row uses slot 0; all its inputs may be NaN."""
    layer = Layer(heads=1, value=70, dtype=torch.float32)
    weights, own = weights_of(layer), draw_tokens(layer, 3)
    tokens = Tokens(*(torch.cat([x, torch.full_like(x, torch.nan)]) for x in vars(own).values()))
    memory, expected = memory_of(layer, SLOTS[1]), memory_of(layer, SLOTS[1])
    out = run(triton, tokens, weights, memory, build_group([chain(3)] * 2, (4, 0)))
    alone = run(reference, own, weights, expected, build_group([chain(3)], SLOTS[1]))
    assert torch.equal(out[3:], torch.zeros_like(out[3:]))
    torch.testing.assert_close(out[:3], alone, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)
    assert_same_memory(memory, expected, KERNEL_FLOAT32)
