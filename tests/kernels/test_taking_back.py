"""Whole recurrent layers: the records and state snapshots that a draft window leaves."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from specdec.kernels.group import Group, RecurrentMemory
from tests.kernels.mixers import KERNEL_SETS, KINDS, STATES, Mixer
from tests.kernels.trees import (
    Parents,
    build_group,
    chain,
    copy_of,
    draw,
    in_order,
    path_to,
    random_tree,
    scattered,
    snapshot_slots,
)
from tests.selection import EXHAUSTIVE
from tests.tolerances import DRIFT_FLOAT32, KERNEL

SLOTS = {1: [4], 3: [7, 2, 5]}
TREE = (-1, 0, 0, 1, 2, 3, 2)
PATH, REJECTED = [0, 2, 6], [1, 3, 4, 5]


@pytest.fixture(params=KERNEL_SETS, ids=lambda chosen: f"{chosen[0]}-{str(chosen[1])[6:]}")
def kernels(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    return request.param


@pytest.fixture(params=KINDS)
def mixer(request: pytest.FixtureRequest, kernels: tuple[str, torch.dtype]) -> Mixer:
    return Mixer(request.param, *kernels)


def close(mixer: Mixer, found: Tensor, expected: Tensor) -> bool:
    tolerance = KERNEL[mixer.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def same(mixer: Mixer, found: RecurrentMemory, slot: int, expected: RecurrentMemory, at: int) -> bool:
    """Compare two slots' sequences. The projection's rounding depends on the width, so not bit for bit."""
    return all(close(mixer, x[slot], y[at]) for x, y in zip(found[:2], expected[:2], strict=True))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("kind", "width"), [("chain", 1), ("chain", 9), ("star", 5), ("random", 17)])
def test_folding_accepted_nodes_equals_feeding_them(mixer: Mixer, kind: str, width: int, rows: int) -> None:
    slots, trees = SLOTS[rows], [draw(kind, width, seed) for seed in range(rows)]
    x_TD, records = mixer.inputs(rows * width), scattered(rows, width, seed=3)
    recorded, fed = mixer.memory(slots), mixer.memory(slots)
    out_TD = mixer.run(x_TD, recorded, build_group(trees, slots, records=records))
    # Rows accept paths of different lengths, one of them empty.
    paths = [[] if b == 1 else path_to(tree, max(0, width - 1 - b)) for b, tree in enumerate(trees)]
    following_TD = mixer.inputs(rows * 3, seed=8)
    expected_TD = []
    for b, path in enumerate(paths):
        if path:
            nodes = [b * width + node for node in path]
            assert close(mixer, out_TD[nodes], mixer.feed(x_TD[nodes], fed, slots[b]))
        expected_TD.append(mixer.feed(following_TD[3 * b : 3 * b + 3], copy_of(fed), slots[b]))

    accepted = [[records[b][node] for node in path] for b, path in enumerate(paths)]
    pending = build_group([chain(3)] * rows, slots, paths=accepted, records=in_order(rows, 3, first=70))
    lazy = copy_of(recorded)
    assert close(mixer, mixer.run(following_TD, lazy, pending), torch.cat(expected_TD))
    mixer.fold(recorded, slots, accepted)
    for slot in slots:
        assert same(mixer, recorded, slot, fed, slot)
        assert same(mixer, lazy, slot, fed, slot)


@pytest.mark.parametrize("node", range(9))
def test_fold_gives_the_state_at_any_accepted_position(mixer: Mixer, node: int) -> None:
    x_TD, records = mixer.inputs(9), scattered(1, 9, seed=3)
    recorded, fed = mixer.memory([4]), mixer.memory([4])
    mixer.run(x_TD, recorded, build_group([chain(9)], [4], records=records))
    mixer.fold(recorded, [4], [records[0][: node + 1]])
    mixer.feed(x_TD[: node + 1], fed, 4)
    assert same(mixer, recorded, 4, fed, 4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("kind", "width"), [("chain", 1), ("chain", 7), ("star", 5), ("random", 7)])
def test_records_and_snapshots_agree_on_every_node(mixer: Mixer, kind: str, width: int, rows: int) -> None:
    slots, trees = SLOTS[rows], [draw(kind, width, seed) for seed in range(rows)]
    x_TD, records = mixer.inputs(rows * width), scattered(rows, width, seed=3)
    snapshots = snapshot_slots(rows, width, slots)
    recorded, whole, before = mixer.memory(slots), mixer.memory(slots), mixer.memory(slots)
    expected_TD = mixer.run(x_TD, recorded, build_group(trees, slots, records=records))
    found_TD = mixer.run(x_TD, whole, build_group(trees, slots, snapshots=snapshots))
    assert close(mixer, found_TD, expected_TD)
    for slot in slots:
        assert torch.equal(whole.state_SHKW[slot], before.state_SHKW[slot])
        assert torch.equal(whole.window_SIC[slot], before.window_SIC[slot])
    untouched = set(range(len(whole.state_SHKW))) - {*slots, *(slot for row in snapshots for slot in row)}
    assert bool(whole.state_SHKW[sorted(untouched)].isnan().all() & whole.input_SRC.isnan().all())
    for b, tree in enumerate(trees):
        for node in range(width):
            folded = copy_of(recorded)
            mixer.fold(folded, [slots[b]], [[records[b][i] for i in path_to(tree, node)]])
            assert same(mixer, whole, snapshots[b][node], folded, slots[b])


def test_a_snapshot_is_promoted_by_its_id_alone(mixer: Mixer) -> None:
    """A second window starts from the last accepted node's slot and may reuse all others."""
    x_TD, following_TD = mixer.inputs(7), mixer.inputs(7, seed=2)
    (snapshots,), whole, fed = snapshot_slots(1, 7, [4]), mixer.memory([4]), mixer.memory([4])
    mixer.run(x_TD, whole, build_group([TREE], [4], snapshots=[snapshots]))
    last, free = snapshots[6], [4, *snapshots[:6]]
    found_TD = mixer.run(following_TD, whole, build_group([TREE], [last], snapshots=[free]))
    mixer.feed(x_TD[PATH], fed, 4)
    expected_TD = mixer.feed(following_TD[PATH], fed, 4)
    assert close(mixer, found_TD[PATH], expected_TD)
    assert same(mixer, whole, free[6], fed, 4)


@pytest.mark.parametrize("snapshots", [False, True], ids=["record", "snapshot"])
def test_rejected_branches_do_not_change_committed_state(mixer: Mixer, snapshots: bool) -> None:
    x_TD = mixer.inputs(7)
    disturbed_TD = x_TD.index_copy(0, torch.tensor(REJECTED), mixer.inputs(4, seed=77))
    (slots,), (records,) = snapshot_slots(1, 7, [4]), in_order(1, 7)
    left: list[RecurrentMemory] = []
    for own_TD in (x_TD, disturbed_TD):
        memory = mixer.memory([4])
        backing = {"snapshots": [slots]} if snapshots else {"records": [records]}
        mixer.run(own_TD, memory, build_group([TREE], [4], **backing))
        if not snapshots:
            mixer.fold(memory, [4], [[records[node] for node in PATH]])
        left.append(memory)
    at = slots[6] if snapshots else 4
    for found, expected in ((m[0] for m in left), (m[1] for m in left)):
        assert torch.equal(found[at], expected[at])
        assert torch.equal(found[4], expected[4])


def wrong_nodes(mixer: Mixer, tree: Parents, group: Group) -> set[int]:
    """Return the nodes whose output or state differs from that of their path as a chain."""
    x_TD, memory = mixer.inputs(len(tree)), mixer.memory([4])
    out_TD, wrong = mixer.run(x_TD, memory, group), set()
    for node in range(len(tree)):
        path, fed, folded = path_to(tree, node), mixer.memory([4]), copy_of(memory)
        expected_D, at = mixer.feed(x_TD[path], fed, 4)[-1], 4
        if group.snapshot_BM is not None:
            at = int(group.snapshot_BM[0, node])
        else:
            assert group.record is not None
            ids = list(zip(*(x[0].tolist() for x in group.record), strict=True))
            mixer.fold(folded, [4], [[ids[i] for i in path]])
        if not close(mixer, out_TD[node], expected_D) or not same(mixer, folded, at, fed, 4):
            wrong.add(node)
    return wrong


@pytest.mark.parametrize("snapshots", [False, True], ids=["record", "snapshot"])
def test_a_wrong_tree_is_noticed(mixer: Mixer, snapshots: bool) -> None:
    backing = {"snapshots": snapshot_slots(1, 7, [4])} if snapshots else {"records": in_order(1, 7)}
    group = build_group([TREE], [4], **backing)
    assert wrong_nodes(mixer, TREE, group) == set()

    swapped = build_group([(-1, 0, 0, 1, 1, 3, 2)], [4], **backing)
    assert 4 in wrong_nodes(mixer, TREE, swapped)
    only_taps = replace(group, tap_BMC=swapped.tap_BMC)
    assert (4 in wrong_nodes(mixer, TREE, only_taps)) == (mixer.sizes.taps > 1)

    # Snapshots use only the parent in the mask, the nearest ancestor; taps use none.
    assert group.ancestors_BMM is not None
    mask_BMM = group.ancestors_BMM.clone()
    mask_BMM[0, 4, 3] = True
    assert (4 in wrong_nodes(mixer, TREE, replace(group, ancestors_BMM=mask_BMM))) == bool(mixer.sizes.heads)


def test_a_stale_record_is_noticed(mixer: Mixer) -> None:
    x_TD, (records,) = mixer.inputs(7), scattered(1, 7, seed=3)
    memory, fed = mixer.memory([4]), mixer.memory([4])
    mixer.run(x_TD, memory, build_group([TREE], [4], records=[records]))
    mixer.feed(x_TD[PATH], fed, 4)
    for nodes, right in ((PATH, True), ([0, 1, 6], False), ([0, 2, 4], False), ([0, 2], False)):
        folded = copy_of(memory)
        mixer.fold(folded, [4], [[records[node] for node in nodes]])
        assert same(mixer, folded, 4, fed, 4) is right


def test_a_stale_snapshot_is_noticed(mixer: Mixer) -> None:
    x_TD, (slots,) = mixer.inputs(7), snapshot_slots(1, 7, [4])
    memory, fed = mixer.memory([4]), mixer.memory([4])
    mixer.run(x_TD, memory, build_group([TREE], [4], snapshots=[slots]))
    mixer.feed(x_TD[PATH], fed, 4)
    assert [node for node in range(7) if same(mixer, memory, slots[node], fed, 4)] == [PATH[-1]]


@EXHAUSTIVE
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("name", [name for name, dtype in KERNEL_SETS[1:] if dtype == torch.float32])
def test_the_state_does_not_drift_over_4000_tokens(kind: str, name: str) -> None:
    """Windows of random trees, a random path of each accepted and folded by the next, in float32."""
    mixer, rng = Mixer(kind, name, torch.float32), Random(0)
    stream_TD, noise_TD = mixer.inputs(4000), mixer.inputs(64, seed=2)
    memory, fed = mixer.memory([4]), mixer.memory([4])
    for piece_TD in stream_TD.split(63):
        mixer.feed(piece_TD, fed, 4)
    done, path, places = 0, [], list(range(40))
    while done < len(stream_TD):
        tree = random_tree(rng.randint(1, 8), seed=done)
        nodes = path_to(tree, rng.randrange(len(tree)))[: len(stream_TD) - done]
        x_TD = noise_TD[torch.randperm(64)[: len(tree)]]
        x_TD[nodes] = stream_TD[done : done + len(nodes)]
        records = [(1, place) for place in rng.sample(places, len(tree))]
        mixer.run(x_TD, memory, build_group([tree], [4], paths=[path], records=[records]))
        path, done = [records[node] for node in nodes], done + len(nodes)
    mixer.fold(memory, [4], [path])
    found, expected = memory.state_SHKW[4], fed.state_SHKW[4]
    assert close(mixer, memory.window_SIC[4], fed.window_SIC[4])
    assert float((found - expected).norm() / expected.norm()) < DRIFT_FLOAT32
