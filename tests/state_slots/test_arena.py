"""The arena allocates slots of three classes from one buffer, and can check its own bookkeeping."""

from collections.abc import Callable
from heapq import heapify

import pytest
import torch

from specdec.errors import CapacityError
from specdec.state_slots.arena import Arena
from specdec.state_slots.integrity import IntegrityError
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.slots import SlabKind

LAYOUT = Layout(
    kv=(KVShape(1, 3), KVShape(2, 5)),
    states=(StateShape(3, 16, 17, 3, 11), StateShape(2, 9, 8, 1, 7)),
    dtype=torch.bfloat16,
)
CPU = torch.device("cpu")


def make_arena(slabs: int = 7, layout: Layout = LAYOUT) -> Arena:
    """Make an arena with `slabs` usable slabs, whose bytes are NaN in every dtype until written."""
    arena = Arena(layout, (slabs + 1) * layout.slab_bytes, CPU)
    arena.data[layout.slab_bytes :].fill_(0xFF)
    return arena


def touched_bytes(arena: Arena, view: torch.Tensor) -> list[int]:
    """Return the offsets of the bytes that a view covers."""
    arena.data.zero_()
    view.view(torch.int16 if view.dtype == torch.bfloat16 else torch.int32).fill_(-1)
    return arena.data.nonzero().flatten().tolist()


def test_the_layout_under_test_has_several_slots_of_each_kind() -> None:
    assert LAYOUT.blocks_per_slab >= 3 and LAYOUT.records_per_slab >= 3


def test_views_have_the_shapes_that_kernels_expect() -> None:
    arena = make_arena()
    slabs, records = 8, LAYOUT.records_per_slab
    assert arena.pages(1).shape == (slabs * LAYOUT.blocks_per_slab, 2, 16, 2, 5)
    memory = arena.recurrent(1)
    assert memory.state_SHKW.shape == (slabs, 2, 9, 8)
    assert memory.window_SIC.shape == (slabs, 1, 7)
    assert memory.update_SRHW.shape == (slabs, records, 2, 8)
    assert memory.decay_SRH.shape == (slabs, records, 2)
    assert memory.input_SRC.shape == (slabs, records, 7)
    assert arena.pages(0).dtype == memory.window_SIC.dtype == memory.input_SRC.dtype == torch.bfloat16
    assert {view.dtype for view in memory} == {torch.float32, torch.bfloat16}
    assert all(view.untyped_storage().data_ptr() == arena.data.data_ptr() for view in memory)
    assert all(view[0].is_contiguous() for view in (arena.pages(0), memory.state_SHKW))


def test_every_slot_covers_its_own_bytes_and_no_others() -> None:
    arena = make_arena(slabs=2)
    for slot in range(len(arena.pages(0))):
        covered = [byte for layer in range(2) for byte in touched_bytes(arena, arena.pages(layer)[slot])]
        assert len(covered) == len(set(covered)) == 2 * 16 * (3 + 10) * 2
        assert min(covered) >= slot * LAYOUT.block_bytes and max(covered) < (slot + 1) * LAYOUT.block_bytes
    memories = [arena.recurrent(layer) for layer in range(2)]
    for slab in range(3):
        start = slab * LAYOUT.slab_bytes
        views = [view[slab] for memory in memories for view in (memory.state_SHKW, memory.window_SIC)]
        covered = [byte for view in views for byte in touched_bytes(arena, view)]
        assert len(covered) == len(set(covered)) == sum(view.nbytes for view in views)
        assert min(covered) >= start and max(covered) < start + LAYOUT.state_bytes
        for place in range(LAYOUT.records_per_slab):
            views = [view[slab, place] for memory in memories for view in memory[2:]]
            covered = [byte for view in views for byte in touched_bytes(arena, view)]
            first = start + place * LAYOUT.record_bytes
            assert len(covered) == len(set(covered)) == sum(view.nbytes for view in views)
            assert min(covered) >= first and max(covered) < first + LAYOUT.record_bytes


def test_the_dummy_slab_is_zero_and_never_handed_out() -> None:
    arena = make_arena(slabs=2)
    assert not arena.data[: LAYOUT.slab_bytes].any()
    assert arena.take_blocks(1, LAYOUT.blocks_per_slab) == list(
        range(LAYOUT.blocks_per_slab, 2 * LAYOUT.blocks_per_slab)
    )
    assert arena.take_state(1) == 2
    assert arena.take_blocks(1, 1) is arena.take_state(1) is arena.take_records(1, 1) is None


def test_snapshots_are_states_that_are_not_cleared() -> None:
    arena = make_arena(slabs=3)
    arena.data.fill_(0xFF)
    slots = arena.take_snapshots(1, 2)
    assert slots is not None and len(set(slots)) == 2
    assert all(bool(arena.recurrent(0).state_SHKW[slot].isnan().all()) for slot in slots)
    assert arena.take_snapshots(1, 2) is None
    arena.release_state(1, slots[0])
    assert arena.take_state(2) == slots[0]
    arena.check_integrity()


def test_a_newly_allocated_state_is_zero() -> None:
    arena = make_arena(slabs=1)
    for owner in range(3):
        slot = arena.take_state(owner)
        assert slot == 1
        for memory in map(arena.recurrent, range(2)):
            assert not memory.state_SHKW[slot].any() and not memory.window_SIC[slot].any()
            memory.state_SHKW[slot] = memory.window_SIC[slot] = torch.nan
        arena.release_state(owner, slot)


def test_blocks_are_consecutive_if_a_slab_has_such_a_run() -> None:
    arena = make_arena()
    per_slab = LAYOUT.blocks_per_slab
    first = arena.take_blocks(1, per_slab)
    arena.release_blocks(1, [first[0], first[2], first[3]])
    assert arena.take_blocks(2, 2) == [first[2], first[3]]
    assert arena.take_blocks(2, 1) == [first[0]]
    assert arena.take_blocks(3, 2 * per_slab) == list(range(2 * per_slab, 4 * per_slab))


def test_blocks_come_from_the_fullest_slab_so_that_others_empty_out() -> None:
    arena = make_arena()
    per_slab = LAYOUT.blocks_per_slab
    one, two = arena.take_blocks(1, per_slab), arena.take_blocks(2, per_slab)
    arena.release_blocks(1, one[1:])
    arena.release_blocks(2, two[:1])
    assert arena.take_blocks(3, 1) == two[:1]
    arena.release_blocks(1, one[:1])
    assert arena.usage().free_slabs == 6


def test_records_share_one_slab_where_that_opens_no_further_one() -> None:
    arena = make_arena()
    per_slab = LAYOUT.records_per_slab
    full = arena.take_records(1, per_slab)
    arena.take_records(2, 1)
    arena.release_records(1, full[:1])
    assert arena.take_records(3, 2) == [(2, 1), (2, 2)]
    assert arena.take_records(3, 1) == full[:1]
    rest = arena.take_records(3, per_slab - 2)
    assert {slab for slab, _ in rest} == {3}
    arena.release_records(3, rest[:-1])
    assert len({slab for slab, _ in arena.take_records(4, 2 * per_slab - 4)}) == 2
    assert arena.usage().partial_slabs == 0
    arena.check_integrity()


def test_a_slab_changes_class_when_it_is_empty() -> None:
    arena = make_arena(slabs=1)
    blocks = arena.take_blocks(1, 2)
    assert arena.take_state(2) is None
    arena.release_blocks(1, blocks)
    assert arena.take_state(2) == 1
    assert arena.take_records(3, 1) is None
    arena.release_state(2, 1)
    assert arena.take_records(3, 1) == [(1, 0)]
    arena.check_integrity()


def test_running_out_changes_nothing() -> None:
    arena = make_arena(slabs=2)
    arena.take_blocks(1, 1)
    before = arena.usage()
    assert arena.take_blocks(2, 2 * LAYOUT.blocks_per_slab) is None
    assert arena.take_records(2, LAYOUT.records_per_slab + 1) is None
    assert arena.usage() == before
    assert arena.take_blocks(2, 2 * LAYOUT.blocks_per_slab - 1) is not None
    assert arena.take_state(2) is None
    arena.check_integrity()


def test_taking_nothing_owns_nothing() -> None:
    arena = make_arena()
    assert arena.take_blocks(1, 0) == arena.take_records(1, 0) == []
    arena.release_owner(1)
    arena.check_integrity()


def test_can_take_counts_the_slabs_that_each_class_would_open() -> None:
    arena = make_arena(slabs=3)
    arena.take_blocks(1, 1)
    spare = LAYOUT.blocks_per_slab - 1
    assert arena.can_take(blocks=spare, states=2)
    assert arena.can_take(blocks=spare, states=1, records=LAYOUT.records_per_slab)
    assert not arena.can_take(blocks=spare, states=1, records=LAYOUT.records_per_slab + 1)
    assert not arena.can_take(blocks=spare + 1, states=2)
    assert arena.can_take(blocks=spare + LAYOUT.blocks_per_slab, states=1)
    assert arena.can_take()


def test_a_shared_block_lives_until_its_last_owner_lets_go() -> None:
    arena = make_arena(slabs=1)
    (block,) = arena.take_blocks(1, 1)
    arena.share_block(2, block)
    arena.check_integrity()
    assert arena.usage().block_bytes == LAYOUT.block_bytes
    arena.release_owner(1)
    assert arena.take_state(3) is None
    arena.check(SlabKind.BLOCK, block, 1)
    arena.release_blocks(2, [block])
    assert arena.take_state(3) == 1


def test_misuse_fails_and_changes_nothing() -> None:
    arena = make_arena()
    blocks = arena.take_blocks(1, 2)
    with pytest.raises(AssertionError, match="holds block"):
        arena.share_block(1, blocks[0])
    with pytest.raises(AssertionError, match="is free"):
        arena.share_block(2, blocks[1] + 1)
    with pytest.raises(AssertionError, match="does not hold"):
        arena.release_blocks(2, blocks)
    with pytest.raises(AssertionError, match="does not hold"):
        arena.release_blocks(1, [*blocks, blocks[1] + 1])
    with pytest.raises(AssertionError, match="named by"):
        arena.generation(SlabKind.RECORD, 3)
    with pytest.raises(AssertionError, match="named by"):
        arena.generation(SlabKind.STATE, (1, 0))
    arena.check_integrity()
    assert arena.usage().block_bytes == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("kind", list(SlabKind))
def test_stale_handles_are_detected(kind: SlabKind) -> None:
    arena = make_arena(slabs=1)
    take: Callable[[int], list] = {
        SlabKind.BLOCK: lambda owner: arena.take_blocks(owner, 1),
        SlabKind.STATE: lambda owner: [arena.take_state(owner)],
        SlabKind.RECORD: lambda owner: arena.take_records(owner, 1),
    }[kind]
    (slot,) = take(1)
    generation = arena.generation(kind, slot)
    arena.check(kind, slot, generation)
    arena.release_owner(1)
    with pytest.raises(IntegrityError, match="stale"):
        arena.check(kind, slot, generation)
    assert take(2) == [slot]
    with pytest.raises(IntegrityError, match="stale"):
        arena.check(kind, slot, generation)
    assert arena.generation(kind, slot) == generation + 1


def test_usage_adds_up() -> None:
    arena = make_arena()
    arena.take_blocks(1, 3)
    arena.take_state(1)
    arena.take_records(1, 2)
    usage = arena.usage()
    assert usage.capacity_bytes == 7 * LAYOUT.slab_bytes
    assert usage.block_bytes == 3 * LAYOUT.block_bytes
    assert usage.state_bytes == LAYOUT.state_bytes
    assert usage.record_bytes == 2 * LAYOUT.record_bytes
    assert (usage.slabs, usage.free_slabs, usage.partial_slabs) == (7, 4, 2)
    assert usage.free_bytes == 4 * LAYOUT.slab_bytes


def test_too_little_memory_is_refused_with_the_amount_that_is_enough() -> None:
    with pytest.raises(CapacityError, match=str(2 * LAYOUT.slab_bytes)) as caught:
        Arena(LAYOUT, 2 * LAYOUT.slab_bytes - 1, CPU)
    assert caught.value.field == "memory_bytes"


def test_models_with_one_kind_of_layer_have_no_slots_of_the_other() -> None:
    plain = make_arena(layout=Layout(LAYOUT.kv, (), torch.float32))
    assert plain.take_blocks(1, 20) == list(range(16, 36))
    with pytest.raises(AssertionError, match="no state"):
        plain.take_state(1)
    recurrent = make_arena(layout=Layout((), LAYOUT.states, torch.float64, torch.float64))
    assert recurrent.take_state(1) == 1 and recurrent.can_take(blocks=0, states=6)
    for arena in (plain, recurrent):
        arena.check_integrity()


def _double_owner_of_a_state(arena: Arena) -> None:
    arena._states.held[2] = dict(arena._states.held[1])


def _shared_state(arena: Arena) -> None:
    arena._states.share(2, next(iter(arena._states.held[1])))


def _double_owner_of_a_block(arena: Arena) -> None:
    arena._blocks.held[2] = dict(arena._blocks.held[1])


def _bitmap_offers_a_live_block(arena: Arena) -> None:
    slab = next(iter(arena._blocks.used))
    arena._blocks.used[slab] &= arena._blocks.used[slab] - 1


def _leaked_slab(arena: Arena) -> None:
    arena._slabs.free.pop()


def _leaked_slots(arena: Arena) -> None:
    del arena._records.held[1]


def _live_slab_listed_as_free(arena: Arena) -> None:
    arena._slabs.free.append(next(iter(arena._states.used)))
    heapify(arena._slabs.free)


def _slab_listed_twice(arena: Arena) -> None:
    arena._slabs.free.append(arena._slabs.free[-1])


def _dummy_listed_as_free(arena: Arena) -> None:
    arena._slabs.free.insert(0, 0)
    heapify(arena._slabs.free)


def _unsorted_free_list(arena: Arena) -> None:
    arena._slabs.free.reverse()


def _stale_handle(arena: Arena) -> None:
    state = next(iter(arena._states.held[1]))
    arena._states.generations[state] += 1


def _generation_taken_back(arena: Arena) -> None:
    (slot, *_) = arena.take_blocks(9, 1)
    arena.release_owner(9)
    arena._blocks.generations[slot] -= 1


def _slab_in_two_classes(arena: Arena) -> None:
    (state,) = arena._states.held[1]
    slot = state * LAYOUT.records_per_slab
    arena._records.held[1][slot] = arena._records.generations[slot] = 1
    arena._records.owners[slot] = 1
    arena._records.handed_out += 1
    arena._records.in_use += 1


def _slab_marked_as_another_class(arena: Arena) -> None:
    arena._slabs.kinds[next(iter(arena._states.used))] = SlabKind.BLOCK


def _slot_in_the_dummy_slab(arena: Arena) -> None:
    arena._blocks.held[1][0] = 1


def _miscounted_spare(arena: Arena) -> None:
    arena._blocks.spare += 1


def _misfiled_slab(arena: Arena) -> None:
    slabs = next(slabs for slabs in arena._blocks.partial if slabs)
    slabs.clear()


def _fullness_bit_lost(arena: Arena) -> None:
    arena._blocks.fullness = 0


def _grid_overruns_the_slab(arena: Arena) -> None:
    arena._records.per_slab += 1


def _miscounted_use(arena: Arena) -> None:
    arena._states.in_use -= 1


MUTANTS = {
    _miscounted_use: "were counted",
    _double_owner_of_a_state: r"held by \[1, 2\] but listed for \[1\]",
    _shared_state: "has 2 owners, and only blocks are shared",
    _double_owner_of_a_block: r"held by \[1, 2\] but listed for \[1\]",
    _bitmap_offers_a_live_block: "the bitmap says",
    _leaked_slab: "is leaked",
    _leaked_slots: r"held by \(\) but listed for \[1\]",
    _live_slab_listed_as_free: "listed as free",
    _slab_listed_twice: "2 times",
    _dummy_listed_as_free: "dummy|0 is listed",
    _unsorted_free_list: "no heap",
    _stale_handle: "is stale",
    _generation_taken_back: "handed out",
    _slab_in_two_classes: "two classes",
    _slab_marked_as_another_class: "marked as block",
    _slot_in_the_dummy_slab: "dummy slab",
    _miscounted_spare: "spare",
    _misfiled_slab: "filed as",
    _fullness_bit_lost: "fullness",
    _grid_overruns_the_slab: "overrun",
}


@pytest.mark.parametrize("corrupt", MUTANTS, ids=lambda corrupt: corrupt.__name__.strip("_"))
def test_integrity_rejects_a_mutant(corrupt: Callable[[Arena], None]) -> None:
    arena = make_arena()
    arena.take_blocks(1, 2)
    arena.take_state(1)
    arena.take_records(1, 2)
    arena.check_integrity()
    corrupt(arena)
    with pytest.raises(IntegrityError, match=MUTANTS[corrupt]):
        arena.check_integrity()
