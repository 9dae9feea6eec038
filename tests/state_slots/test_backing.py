"""Private slots: borrowed all or none, promoted without a copy, and all released."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import BACKINGS, Backing, CommittedState, release_path
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.slots import SlabKind
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row
from tests.models.drafted import random_tree

LAYOUT = Layout(
    kv=(KVShape(1, 4),),
    states=(StateShape(3, 16, 17, 3, 11), StateShape(2, 9, 8, 1, 7)),
    dtype=torch.bfloat16,
)
WITHOUT_STATES = Layout(kv=(KVShape(1, 4),), states=(), dtype=torch.float32)
KINDS = {"record": SlabKind.RECORD, "snapshot": SlabKind.STATE}
TABLE_N = torch.zeros(1, dtype=torch.int64)
OWNER = "somebody"


@dataclass
class Bench:
    """An arena with a given number of usable slabs, and a sequence that has a state in it."""

    name: str
    arena: Arena
    backing: Backing
    committed: CommittedState

    def per_slab(self) -> int:
        return LAYOUT.records_per_slab if self.name == "record" else 1

    def held(self) -> dict[SlabKind, int]:
        """Count the live slots."""
        usage = self.arena.usage()
        return {
            SlabKind.RECORD: usage.record_bytes // LAYOUT.record_bytes,
            SlabKind.STATE: usage.state_bytes // LAYOUT.state_bytes,
        }

    def generations(self, slots: Sequence[Any]) -> list[int]:
        return [self.arena.generation(KINDS[self.name], slot) for slot in slots]

    def is_live(self, slot: Any, generation: int) -> bool:
        try:
            self.arena.check(KINDS[self.name], slot, generation)
        except AssertionError:
            return False
        return True

    def is_whole(self) -> bool:
        """Check the arena, and that only the committed slots are live."""
        self.arena.check_integrity()
        return self.held() == {SlabKind.RECORD: len(self.committed.path), SlabKind.STATE: 1}


def make(name: str, slabs: int = 12, layout: Layout = LAYOUT) -> Bench:
    arena = Arena(layout, (slabs + 1) * layout.slab_bytes, torch.device("cpu"))
    state = arena.take_state(OWNER) if layout.states else 0
    assert state is not None
    return Bench(name, arena, BACKINGS[name](arena), CommittedState(state))


both = pytest.mark.parametrize("name", ["record", "snapshot"])


@both
def test_every_node_gets_its_own_slot(name: str) -> None:
    bench = make(name)
    slots = bench.backing.begin(OWNER, 7)
    assert slots is not None and len(set(slots)) == 7
    assert bench.committed.state not in slots
    assert bench.held()[KINDS[name]] == 7 + (name == "snapshot")
    bench.arena.check_integrity()


@both
def test_draft_slots_take_the_computed_bytes(name: str) -> None:
    bench = make(name)
    free = bench.arena.usage().free_slabs
    assert bench.backing.begin(OWNER, free * bench.per_slab()) is not None
    assert bench.arena.usage().free_slabs == 0


@both
def test_a_window_that_does_not_fit_borrows_nothing(name: str) -> None:
    bench = make(name, slabs=4)
    most = 3 * bench.per_slab()
    before = bench.arena.usage()
    assert bench.backing.begin(OWNER, most + 1) is None
    assert bench.arena.usage() == before and bench.is_whole()
    slots = bench.backing.begin(OWNER, most)
    assert slots is not None and bench.backing.begin("other", 1) is None
    bench.committed = bench.backing.promote(OWNER, bench.committed, slots, [0])
    assert bench.is_whole()
    assert bench.backing.begin("other", 1) is not None


@both
def test_only_the_rows_slots_change(name: str) -> None:
    bench = make(name)
    row = Row(TokenTree.chain([1, 2, 3]), 5, TABLE_N, bench.committed.state)
    slots = bench.backing.begin(OWNER, 3)
    assert slots is not None
    dressed = bench.backing.with_slots(row, slots)
    kinds = (dressed.records, dressed.snapshots)
    assert kinds == ((slots, None) if name == "record" else (None, slots))
    plain = (dressed.tree, dressed.length, dressed.state, tuple(dressed.path))
    assert plain == (row.tree, row.length, row.state, tuple(row.path)) and dressed.table_N is row.table_N


@both
def test_a_model_without_states_needs_no_slots(name: str) -> None:
    bench = make(name, layout=WITHOUT_STATES)
    slots = bench.backing.begin(OWNER, 1000)
    assert slots is not None and len(slots) == 0
    row = Row(TokenTree.chain([1, 2]), 5, TABLE_N, 0)
    assert bench.backing.with_slots(row, slots) == row
    assert bench.backing.promote(OWNER, CommittedState(0), slots, [0, 1]) == CommittedState(0)
    assert release_path(bench.arena, OWNER, CommittedState(0)) == CommittedState(0)
    bench.arena.check_integrity()


@both
def test_promoting_copies_nothing(name: str) -> None:
    """The accepted nodes' data stay where they were written, and no byte has moved."""
    bench = make(name)
    slots = bench.backing.begin(OWNER, 5)
    assert slots is not None
    bench.arena.data[LAYOUT.slab_bytes :].random_(generator=torch.Generator().manual_seed(1))
    before = bench.arena.data.clone()
    committed = bench.backing.promote(OWNER, bench.committed, slots, [0, 2, 4])
    assert torch.equal(bench.arena.data, before)
    if name == "record":
        assert committed == CommittedState(bench.committed.state, (slots[0], slots[2], slots[4]))
    else:
        assert committed == CommittedState(slots[4])


@both
def test_the_last_state_of_a_path_is_not_always_the_last_node(name: str) -> None:
    bench = make(name)
    slots = bench.backing.begin(OWNER, 4)
    assert slots is not None
    generations = bench.generations(slots)
    bench.committed = bench.backing.promote(OWNER, bench.committed, slots, [0, 1])
    kept = {0, 1} if name == "record" else {1}
    live = {i for i, slot in enumerate(slots) if bench.is_live(slot, generations[i])}
    assert live == kept and bench.is_whole()


def test_a_path_is_released_after_folding() -> None:
    """By the next window, which folds it and is promoted itself; and by an explicit fold."""
    bench = make("record")
    for nodes in ([0, 1], [0], [0, 1, 2]):
        slots = bench.backing.begin(OWNER, 4)
        assert slots is not None and not set(slots) & set(bench.committed.path)
        bench.committed = bench.backing.promote(OWNER, bench.committed, slots, nodes)
        assert len(bench.committed.path) == len(nodes) and bench.is_whole()
    bench.committed = release_path(bench.arena, OWNER, bench.committed)
    assert bench.committed.path == () and bench.is_whole()
    assert release_path(bench.arena, OWNER, bench.committed) == bench.committed


@both
def test_a_request_cancelled_in_mid_window_holds_no_slots(name: str) -> None:
    bench = make(name)
    slots = bench.backing.begin(OWNER, 4)
    assert slots is not None
    bench.committed = bench.backing.promote(OWNER, bench.committed, slots, [0, 1])
    assert bench.backing.begin(OWNER, 3) is not None
    bench.arena.release_owner(OWNER)
    bench.arena.check_integrity()
    assert bench.arena.usage().free_slabs == bench.arena.usage().slabs


@both
def test_slots_of_another_owner_are_not_promoted(name: str) -> None:
    bench = make(name)
    slots = bench.backing.begin("other", 3)
    assert slots is not None
    with pytest.raises(AssertionError):
        bench.backing.promote(OWNER, bench.committed, slots, [0, 1])


@both
@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_sequences_that_share_an_arena_never_lose_or_mix_up_a_slot(name: str, seed: int) -> None:
    rng, arena = Random(seed), make(name).arena
    arena.release_owner(OWNER)
    backing, running = BACKINGS[name](arena), dict[int, CommittedState]()
    for step in range(40):
        owner = rng.randrange(4)
        if owner not in running:
            state = arena.take_state(owner)
            if state is not None:
                running[owner] = CommittedState(state)
        elif rng.random() < 0.15:
            arena.release_owner(owner)
            del running[owner]
        elif rng.random() < 0.2:
            running[owner] = release_path(arena, owner, running[owner])
        else:
            tree = random_tree(rng, rng.randint(1, 9), 50)
            slots = backing.begin(owner, len(tree))
            if slots is not None:
                nodes = tree.path(rng.randrange(len(tree)))
                running[owner] = backing.promote(owner, running[owner], slots, nodes)
        arena.check_integrity()
        usage = arena.usage()
        assert usage.state_bytes == len(running) * LAYOUT.state_bytes, step
        assert usage.record_bytes == sum(len(c.path) for c in running.values()) * LAYOUT.record_bytes
        assert len({c.state for c in running.values()}) == len(running)
    for owner in running:
        arena.release_owner(owner)
    assert arena.usage().free_slabs == arena.usage().slabs
