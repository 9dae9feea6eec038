"""The recurrence's GPU kernels, in the interpreter, against the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group, RecordIds, RecurrentMemory
from specdec.kernels.recurrence import reference, triton
from tests.kernels.interpreter import poison
from tests.kernels.tokens import SLOTS, Tokens, draw_tokens, run, start, with_pending
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
from tests.tolerances import KERNEL_FLOAT32

LAYER = Layer(heads=2, groups=1, dtype=torch.float32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)


def assert_equals_reference(
    tokens: Tokens, memory: RecurrentMemory, group: Group, k_path: Tensor | None = None
) -> None:
    expected_memory, actual_memory = copy_of(memory), copy_of(memory)
    actual = run(triton, tokens, actual_memory, group, k_path)
    expected = run(reference, tokens, expected_memory, group, k_path)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=KERNEL_FLOAT32, atol=KERNEL_FLOAT32)
    assert_same_memory(actual_memory, expected_memory, KERNEL_FLOAT32)


@pytest.mark.parametrize(
    ("kind", "width", "backing", "pending", "rows", "delta"),
    [
        ("chain", 1, "certain", True, 3, True),
        ("chain", 1, "record", False, 3, True),
        ("chain", 1, "record", True, 1, False),
        ("chain", 5, "certain", True, 3, True),
        ("random", 7, "record", True, 3, True),
        ("random", 7, "record", True, 1, False),
        ("chain", 8, "certain", False, 1, False),
        ("star", 8, "record", False, 1, True),
        ("random", 9, "record", True, 3, True),
        ("chain", 33, "record", True, 1, True),
        ("random", 63, "record", True, 1, True),
        ("random", 33, "record", False, 1, False),
        ("chain", 33, "certain", True, 3, True),
        ("chain", 130, "certain", True, 1, False),
        ("chain", 3, "snapshot", False, 1, True),
        ("random", 9, "snapshot", False, 3, False),
    ],
)
def test_window_equals_reference(
    kind: str, width: int, backing: str, pending: bool, rows: int, delta: bool
) -> None:
    """Of three rows the first has no pending path; the others have paths of different lengths."""
    memory, paths, k_path = start(LAYER, rows, delta=delta, pending=pending)
    group = build_group(
        [draw(kind, width, seed) for seed in range(rows)],
        SLOTS[rows],
        paths=paths,
        records=scattered(rows, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(rows, width, SLOTS[rows]) if backing == "snapshot" else None,
    )
    assert_equals_reference(draw_tokens(LAYER, rows * width, delta=delta), memory, group, k_path)


@pytest.mark.parametrize(
    ("width", "backing"), [(3, "certain"), (2, "record"), (18, "record"), (2, "snapshot")]
)
def test_blocks_of_columns_share_a_head(width: int, backing: str) -> None:
    """Sizes that fill no block; keys shared by two heads; inputs that are columns of a projection."""
    layer = Layer(groups=2, heads=4, key=33, value=37, dtype=torch.float32)
    memory, paths, k_path = start(layer, 1, delta=True, pending=backing != "snapshot")
    group = build_group(
        [chain(width)],
        SLOTS[1],
        paths=paths,
        records=scattered(1, width, seed=9) if backing == "record" else None,
        snapshots=snapshot_slots(1, width, SLOTS[1]) if backing == "snapshot" else None,
    )
    tokens = draw_tokens(layer, width)
    columns = tokens.map(lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]])
    assert_equals_reference(columns, memory, group, k_path)


@pytest.mark.parametrize("width", [2, 17])
def test_narrow_inputs_are_computed_wide_and_rounded_once(width: int) -> None:
    tokens = draw_tokens(LAYER, width).map(torch.Tensor.bfloat16)
    memory, group = make_memory(LAYER, SLOTS[1]), build_group([chain(width)], SLOTS[1])
    wide = run(triton, tokens.map(torch.Tensor.float), copy_of(memory), group)
    narrow = run(triton, tokens, memory, group)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("width", [3, 17])
@pytest.mark.parametrize("backing", ["certain", "record", "snapshot"])
def test_the_dummy_row_changes_nothing_and_gives_zero(width: int, backing: str) -> None:
    """The dummy row uses slot 0 and record (0, 0); all its inputs may be NaN."""

    def spoil(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x, torch.nan)])

    memory, own = make_memory(LAYER, (4,)), draw_tokens(LAYER, width)
    expected, own_ids = copy_of(memory), [(1, i) for i in range(width)]
    slots = snapshot_slots(1, width, [4])[0]
    records = [own_ids, [(0, 0)] * width] if backing == "record" else None
    snapshots = [slots, [0] * width] if backing == "snapshot" else None
    group = build_group([chain(width)] * 2, (4, 0), records=records, snapshots=snapshots)
    out = run(triton, own.map(spoil), memory, group)
    assert torch.equal(out[width:], torch.zeros_like(out[width:]))
    alone = {"records": records and records[:1], "snapshots": snapshots and snapshots[:1]}
    assert close(out[:width], run(reference, own, expected, build_group([chain(width)], (4,), **alone)))
    assert_same_memory(memory, expected, KERNEL_FLOAT32)


@pytest.mark.parametrize(("width", "every"), [(8, 2), (20, 5)])
def test_every_node_equals_its_path_as_a_chain_and_a_wrong_ancestor_is_noticed(
    width: int, every: int
) -> None:
    tree, tokens, memory = random_tree(width, seed=8), draw_tokens(LAYER, width), make_memory(LAYER, SLOTS[1])
    group = build_group([tree], SLOTS[1], records=in_order(1, width))
    right, alone = run(triton, tokens, copy_of(memory), group), {}
    for node in range(width - 1, 0, -every):
        path = path_to(tree, node)
        alone[node] = run(
            triton, tokens.pick(path), copy_of(memory), build_group([chain(len(path))], SLOTS[1])
        )[-1]
        assert close(right[node], alone[node])
    assert group.ancestors_BMM is not None
    for i in list(alone)[:3]:
        mutant = group.ancestors_BMM.clone()
        mutant[0, i, path_to(tree, i)[-2]] ^= True
        assert not close(
            run(triton, tokens, copy_of(memory), replace(group, ancestors_BMM=mutant))[i], alone[i]
        )


@pytest.mark.parametrize("width", [2, 18])
def test_a_stale_record_in_a_path_is_noticed(width: int) -> None:
    memory, paths, k_path = with_pending(LAYER, 1)
    following, expected = draw_tokens(LAYER, width), copy_of(memory)
    records = scattered(1, width, seed=11)
    group = build_group([chain(width)], SLOTS[1], paths=paths, records=records)
    out = run(reference, following, expected, group, k_path)
    stale = next(record for record in scattered(1, 9, seed=5)[0] if record not in paths[0])
    for path, right in ((paths[0], True), ([*paths[0][:-1], stale], False)):
        found = copy_of(memory)
        group = build_group([chain(width)], SLOTS[1], paths=[path], records=records)
        assert close(run(triton, following, found, group, k_path), out) is right
        assert close(found.state_SHKW[4], expected.state_SHKW[4]) is right


@pytest.mark.parametrize(("kind", "width"), [("chain", 8), ("random", 8), ("chain", 40), ("random", 20)])
def test_strong_decays_stay_finite_and_exact(kind: str, width: int) -> None:
    """G falls to -800 in a walk: float32 differences of it would be off by 6e-5."""
    tokens = draw_tokens(LAYER, width)
    strong = torch.tensor([-80.0, -1e-3, -1e-3]).repeat(width)[:width, None].expand(-1, 2).contiguous()
    group = build_group([draw(kind, width, 2)], SLOTS[1], records=in_order(1, width))
    assert_equals_reference(replace(tokens, decay=strong), make_memory(LAYER, SLOTS[1]), group)


def test_fold_gives_the_state_at_any_accepted_position() -> None:
    """Also for a layer that is only a convolution."""
    memory, _, _ = with_pending(LAYER, 3)
    k_path = draw_tokens(LAYER, 27, seed=3).k.unflatten(0, (3, 9))
    memory.input_SRC.copy_(torch.randn(memory.input_SRC.shape))
    records = scattered(3, 9, seed=5)
    path = RecordIds(*(torch.tensor([[at[n] for at in row] for row in records]) for n in range(2)))
    for keys, lengths in ((k_path, [4, 0, 7]), (None, [1, 2, 3])):
        actual, expected = copy_of(memory), copy_of(memory)
        for own, found in ((triton, actual), (reference, expected)):
            own.fold(found, torch.tensor(SLOTS[3]), path, torch.tensor(lengths), keys)
        assert_same_memory(actual, expected, KERNEL_FLOAT32)
