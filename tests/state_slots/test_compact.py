"""Blocks scattered over slabs are compacted when a state or a record needs a slab."""

import itertools
from collections.abc import Mapping, Set
from random import Random

import pytest
import torch

from specdec.state_slots.arena import Arena
from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.slots import FixedOwner, Owner, SlabKind, SlotPool
from tests.state_slots.test_arena_properties import LAYOUT, PER_SLAB

SLABS = 8


class Tables:
    """Owners' tables, and the values each wrote into its blocks."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.arena = Arena(LAYOUT, (SLABS + 1) * LAYOUT.slab_bytes, torch.device("cpu"))
        self.arena.attach_tables(self)
        self.can_move = True
        self.tables: dict[int, dict[int, int]] = {}
        """Block -> value written there, by owner."""

    def may_move(self) -> bool:
        return self.can_move

    def move_blocks(self, moved: Mapping[int, int], owners: Set[Owner]) -> None:
        for owner, table in self.tables.items():
            assert (owner in owners) == any(block in moved for block in table)
            self.tables[owner] = {moved.get(block, block): mark for block, mark in table.items()}

    def bytes_of(self, block: int) -> torch.Tensor:
        slab, place = divmod(block, LAYOUT.blocks_per_slab)
        start = slab * LAYOUT.slab_bytes + place * LAYOUT.block_bytes
        return self.arena.data[start : start + LAYOUT.block_bytes]

    def scatter(self) -> None:
        """Fill the arena with blocks, share some, and release most, anywhere."""
        for owner in range(SLABS * PER_SLAB[SlabKind.BLOCK]):
            blocks = self.arena.take_blocks(owner, 1)
            assert blocks
            mark = self.draw.randrange(256)
            self.bytes_of(blocks[0]).fill_(mark)
            self.tables[owner] = {blocks[0]: mark}
        for owner in self.draw.sample(sorted(self.tables), len(self.tables) * 3 // 4):
            self.arena.release_owner(owner)
            del self.tables[owner]
        owners = sorted(self.tables)
        for own, other in itertools.pairwise(owners):
            block = next(iter(self.tables[other]))
            self.arena.share_block(own, block)
            self.tables[own][block] = self.tables[other][block]

    def check(self) -> None:
        self.arena.check_integrity()
        for owner, table in self.tables.items():
            self.arena.check_held(owner, table, [])
            for block, mark in table.items():
                assert (self.bytes_of(block) == mark).all()


@pytest.mark.parametrize("seed", range(20))
def test_states_get_the_slabs_that_blocks_leave_when_moved_together(seed: int) -> None:
    tables = Tables(seed)
    tables.scatter()
    arena, free = tables.arena, tables.arena.usage().free_slabs
    live = len({block for table in tables.tables.values() for block in table})
    possible = SLABS - -(-live // PER_SLAB[SlabKind.BLOCK])
    assert arena.can_take(states=possible) and not arena.can_take(states=possible + 1)
    for number in range(possible):
        state = arena.take_state(("state", number))
        assert state is not None
        assert not arena.data[state * LAYOUT.slab_bytes :][: LAYOUT.state_bytes].any()
        arena.data[state * LAYOUT.slab_bytes :][: LAYOUT.state_bytes].fill_(0xFF)
    assert arena.take_state("one more") is None
    for number in range(possible):
        arena.release_owner(("state", number))
    tables.check()
    assert free < possible and arena.moved_blocks


def test_nothing_moves_while_an_owner_cannot_be_notified() -> None:
    tables = Tables(0)
    tables.scatter()
    tables.can_move = False
    free = tables.arena.usage().free_slabs
    assert not tables.arena.can_take(states=free + 1) and not tables.arena.moved_blocks
    tables.check()


def test_blocks_are_not_moved_for_blocks() -> None:
    tables = Tables(0)
    tables.scatter()
    live = len({block for table in tables.tables.values() for block in table})
    room = SLABS * PER_SLAB[SlabKind.BLOCK] - live
    assert not tables.arena.can_take(blocks=room + 1) and tables.arena.can_take(blocks=room)
    assert not tables.arena.moved_blocks


def test_uncopied_bytes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the tables are updated, but nothing is copied."""
    tables = Tables(3)
    tables.scatter()
    monkeypatch.setattr(tables.arena, "block_bytes_X", lambda block: torch.zeros(1))
    assert tables.arena.can_take(states=tables.arena.usage().free_slabs + 1)
    with pytest.raises(AssertionError):
        tables.check()


def fix_some(tables: Tables) -> dict[FixedOwner, int]:
    """Share a block in each second slab with an owner that another process reads."""
    blocks = sorted({block for table in tables.tables.values() for block in table})
    by_slab = {block // PER_SLAB[SlabKind.BLOCK]: block for block in blocks}
    fixed = {FixedOwner(): block for slab, block in by_slab.items() if slab % 2}
    for owner, block in fixed.items():
        tables.arena.share_block(owner, block)
    return fixed


def check_fixed(tables: Tables, fixed: Mapping[FixedOwner, int]) -> None:
    for owner, block in fixed.items():
        tables.arena.check_held(owner, [block], [])


@pytest.mark.parametrize("seed", range(10))
def test_slots_read_by_address_do_not_move(seed: int) -> None:
    tables = Tables(seed)
    tables.scatter()
    fixed = fix_some(tables)
    before = {block: tables.bytes_of(block).clone() for block in fixed.values()}
    states = 0
    while tables.arena.take_state(("state", states)) is not None:
        states += 1
    check_fixed(tables, fixed)
    assert all(torch.equal(tables.bytes_of(block), before[block]) for block in fixed.values())
    tables.check()


def test_a_mutant_that_moves_it_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotPool, "_may_move", lambda pool, slab: True)
    tables = Tables(3)
    tables.scatter()
    fixed = fix_some(tables)
    while tables.arena.take_state("states of one owner") is not None:
        pass
    with pytest.raises(IntegrityError):
        check_fixed(tables, fixed)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_failure_surviving_owners_keep_their_unshared_slots(seed: int) -> None:
    draw, arena = Random(seed), Arena(LAYOUT, (SLABS + 1) * LAYOUT.slab_bytes, torch.device("cpu"))
    kept, other = [FixedOwner(), FixedOwner()], "a request"
    for owner in (*kept, other):
        assert arena.take_blocks(owner, draw.randrange(1, PER_SLAB[SlabKind.BLOCK] + 2))
        assert arena.take_snapshots(owner, draw.randrange(2)) is not None
    shared = arena.take_blocks(other, 1)
    assert shared
    arena.share_block(kept[0], shared[0])
    blocks, states = arena._blocks.held, arena._states.held
    theirs = {own: (list(blocks[own]), list(states.get(own, ()))) for own in kept}
    arena.forget(keeping=kept)
    theirs[kept[0]][0].remove(shared[0])
    arena.check_owners(kept)
    for owner, (own_blocks, own_states) in theirs.items():
        arena.check_held(owner, own_blocks, own_states)
    while (taken := arena.take_blocks(other, 1)) is not None:
        assert not any(taken[0] in own for own, _ in theirs.values())
    arena.check_integrity()
    for owner in (*kept, other):
        arena.release_owner(owner)
    assert arena.usage().free_slabs == arena.usage().slabs
