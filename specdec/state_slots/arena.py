"""The owner of a device's sequence memory: KV blocks, recurrent states and draft records."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import CapacityError
from specdec.kernels.group import RecurrentMemory
from specdec.state_slots.integrity import IntegrityError, prove
from specdec.state_slots.layout import Layout
from specdec.state_slots.pages import CAN_RELEASE, release_pages
from specdec.state_slots.pinned import Runtime, pin
from specdec.state_slots.slots import Owner, SlabKind, SlabList, SlotPool
from specdec.state_slots.views import page_views, recurrent_views
from specdec.state_slots.window import RecordSlot

SlotId = int | RecordSlot
"""A block's or state's index; a record's slab and index."""
SlotPair = tuple[int, int]
"""The source and the target of a copy."""


@dataclass(frozen=True, slots=True)
class ArenaUsage:
    """An arena's memory usage. A shared block counts once; the dummy slab is excluded."""

    capacity_bytes: int
    block_bytes: int
    state_bytes: int
    record_bytes: int
    cached_block_bytes: int
    """Held only by evictable owners; not included in the three above."""
    cached_state_bytes: int
    free_bytes: int
    """In free slabs. The remainder is holes and padding."""
    slabs: int
    free_slabs: int
    partial_slabs: int
    """Partly used slabs."""

    @property
    def used_bytes(self) -> int:
        return self.block_bytes + self.state_bytes + self.record_bytes

    @property
    def cached_bytes(self) -> int:
        return self.cached_block_bytes + self.cached_state_bytes


class Evictor(Protocol):
    """Evicts cached slots when memory is short."""

    def make_room(self, fits: Callable[[], bool]) -> bool:
        """Evict until `fits()`; return whether it does."""
        ...

    def pinned(self) -> tuple[Iterable[int], Iterable[int]]:
        """Return the cached blocks and states that cannot be evicted now."""
        ...


class BlockTables(Protocol):
    """Block tables that are updated when blocks move."""

    def may_move(self) -> bool:
        """Return whether every table can be updated now."""
        ...

    def move_blocks(self, moved: Mapping[int, int], owners: Set[Owner]) -> None:
        """Update the tables of these owners after blocks have moved."""
        ...


class ArenaMirror(Protocol):
    """Repeats on other ranks what an arena does to its bytes between forward passes."""

    def zeroed(self, state: int) -> None:
        """Zero a state's slot."""
        ...

    def copied(self, blocks: Sequence[SlotPair], states: Sequence[SlotPair]) -> None:
        """Copy slots."""
        ...

    def gave_back(self) -> None:
        """Release all pages."""
        ...


class Arena:
    """One byte tensor, cut into slabs, whose slots it allocates.

    A slab serves one class at a time and is free again when its last slot is. Id 0 of every class is in slab
    0, which is never allocated: padding rows may read and write it, and no result depends on its contents. A
    new block or record has undefined contents, NaN included; a new state is zero. One thread owns an arena.
    """

    def __init__(
        self,
        layout: Layout,
        num_bytes: int,
        device: torch.device,
        *,
        pinned: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        """Allocate the memory; `pinned` host memory is directly accessible to a GPU.

        `runtime` is CUDA's, or a test's.
        """
        num_slabs = num_bytes // layout.slab_bytes
        if num_slabs < 2:
            raise CapacityError(
                f"memory_bytes is {num_bytes}, which holds {num_slabs} slabs of {layout.slab_bytes} bytes, "
                f"and one is set aside: give at least {2 * layout.slab_bytes}",
                field="memory_bytes",
            )
        self.layout = layout
        try:
            size = num_slabs * layout.slab_bytes
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CapacityError(
                f"memory_bytes is {num_bytes}, which {device} does not have; give less", field="memory_bytes"
            ) from error
        if pinned:
            pin(self.data, self, runtime)
        self._slab_bytes_SX = self.data.view(num_slabs, layout.slab_bytes)
        self._slab_bytes_SX[0].zero_()
        self._pages = page_views(self.data, layout)
        self._recurrent = recurrent_views(self.data, layout)
        self._slabs = SlabList(num_slabs)
        self._blocks = SlotPool(SlabKind.BLOCK, layout.blocks_per_slab, self._slabs)
        self._states = SlotPool(SlabKind.STATE, layout.states_per_slab, self._slabs)
        self._records = SlotPool(SlabKind.RECORD, layout.records_per_slab, self._slabs)
        self._pools = {pool.kind: pool for pool in (self._blocks, self._states, self._records)}
        self._evictor: Evictor | None = None
        self._tables: BlockTables | None = None
        self.mirror: ArenaMirror | None = None
        """The other ranks of a tensor-parallel group; None: this arena is the only one."""
        self.moved_blocks = 0
        self.first_passes = 0
        """Number of forward passes with one-time costs, as in `ArenaViews`."""

    def attach_evictor(self, evictor: Evictor) -> None:
        """Attach the evictor that is called when memory is short."""
        self._evictor = evictor

    def attach_tables(self, tables: BlockTables) -> None:
        """Allow compaction, which updates these tables; without tables no block moves."""
        self._tables = tables

    def pages(self, layer: int) -> Tensor:
        """Return the blocks of an attention layer: [num_blocks, parts, block_tokens, J, D]."""
        return self._pages[layer]

    def recurrent(self, layer: int) -> RecurrentMemory:
        """Return the slots of a recurrent layer."""
        return self._recurrent[layer]

    def take_blocks(self, owner: Owner, n: int) -> list[int] | None:
        """Allocate n blocks, adjacent if a slab has such a run; None if they do not fit."""
        return self._take(self._blocks, owner, n)

    def take_state(self, owner: Owner) -> int | None:
        """Allocate a state slot with zero states and conv windows, or return None."""
        slots = self._take(self._states, owner, 1)
        if slots is None:
            return None
        self.zero_state(slots[0])
        return slots[0]

    def take_snapshots(self, owner: Owner, n: int) -> list[int] | None:
        """Allocate n state slots with undefined contents, for windows that overwrite them, or return None."""
        return self._take(self._states, owner, n)

    def take_records(self, owner: Owner, n: int) -> list[RecordSlot] | None:
        """Allocate n records, in one slab if that opens no further slab, or return None."""
        slots = self._take(self._records, owner, n)
        if slots is None:
            return None
        return [divmod(slot, self.layout.records_per_slab) for slot in slots]

    def share_block(self, owner: Owner, block: int) -> None:
        """Add an owner to a live block; it stays allocated until the last owner releases it."""
        self._blocks.share(owner, block)

    def share_state(self, owner: Owner, state: int) -> None:
        """Add an owner to a live state, which must not be written from now on."""
        self._states.share(owner, state)

    def release_blocks(self, owner: Owner, blocks: Sequence[int]) -> None:
        self._blocks.release(owner, blocks)

    def release_state(self, owner: Owner, state: int) -> None:
        self._states.release(owner, [state])

    def release_records(self, owner: Owner, records: Iterable[RecordSlot]) -> None:
        per_slab = self.layout.records_per_slab
        self._records.release(owner, [slab * per_slab + index for slab, index in records])

    def release_owner(self, owner: Owner) -> None:
        """Release all slots of `owner`, if any."""
        for pool in self._pools.values():
            pool.release_owner(owner)

    def _take(self, pool: SlotPool, owner: Owner, n: int) -> list[int] | None:
        """Allocate n slots of a class, evicting if needed."""
        contiguous = pool is self._records
        slots = pool.take(owner, n, contiguous=contiguous)
        if slots is None and self.can_take(**{f"{pool.kind}s": n}):
            slots = pool.take(owner, n, contiguous=contiguous)
        return slots

    def _compact(self) -> bool:
        """Free a slab by moving the blocks of the emptiest one; return whether that worked."""
        tables = self._tables
        if tables is None or not self.layout.kv or not tables.may_move():
            return False
        moved = self._blocks.evacuate()
        self.copy_from(self, list(moved.items()), ())
        self.moved_blocks += len(moved)
        tables.move_blocks(
            moved, {owner for block in moved.values() for owner in self._blocks.owners_of(block)}
        )
        return bool(moved)

    def zero_state(self, state: int) -> None:
        """Zero the states and conv windows of a slot."""
        self.state_bytes_X(state).zero_()
        if self.mirror:
            self.mirror.zeroed(state)

    def copy_from(self, other: "Arena", blocks: Sequence[SlotPair], states: Sequence[SlotPair]) -> None:
        """Copy slots from another arena, or this one."""
        for source, to in blocks:
            self.block_bytes_X(to).copy_(other.block_bytes_X(source), non_blocking=True)
        for source, to in states:
            self.state_bytes_X(to).copy_(other.state_bytes_X(source), non_blocking=True)
        if self.mirror:
            assert other is self, "ranks have one arena each"
            self.mirror.copied(blocks, states)

    def hand_over_state(self, owner: Owner, new_owner: Owner, state: int) -> None:
        """Transfer a live state to another owner."""
        self._states.share(new_owner, state)
        self._states.release(owner, [state])

    def state_bytes_X(self, state: int) -> Tensor:
        """Return a view of all recurrent layers' states and conv windows of a slot."""
        return self._slab_bytes_SX[state, : self.layout.state_bytes]

    def block_bytes_X(self, block: int) -> Tensor:
        """Return a view of all attention layers' keys and values of a block."""
        size = self.layout.block_bytes
        slab, index = divmod(block, self.layout.blocks_per_slab)
        return self._slab_bytes_SX[slab, index * size : (index + 1) * size]

    def can_take(self, *, blocks: int = 0, states: int = 0, records: int = 0) -> bool:
        """Return whether all of these can be allocated now, in any order; evicts until they can."""

        def fits() -> bool:
            while not self._fits(blocks, states, records):
                # Compacting blocks frees whole slabs for other classes, but adds no capacity for blocks.
                if not (states or records) or not self._compact():
                    return False
            return True

        return fits() or (
            self._evictor is not None
            and self._could_fit(blocks, states, records)
            and self._evictor.make_room(fits)
        )

    @property
    def held(self) -> int:
        """Number of live slots."""
        return sum(len(pool.owners) for pool in self._pools.values())

    def might_take(self, *, blocks: int = 0, states: int = 0, records: int = 0) -> bool:
        """Return whether all of these could be allocated, possibly after eviction; evicts nothing."""
        return self._fits(blocks, states, records) or self._could_fit(blocks, states, records)

    @property
    def has_free_state(self) -> bool:
        """True if a state can be allocated without eviction."""
        return self._fits(0, 1, 0)

    def _could_fit(self, blocks: int, states: int, records: int) -> bool:
        """Return whether evicting everything evictable would free enough memory."""
        pinned_blocks, pinned_states = self._evictor.pinned() if self._evictor else ((), ())
        slabs = self._records.new_slabs(records) + len(self._records.used)
        for pool, pinned, needed in (
            (self._blocks, pinned_blocks, blocks),
            (self._states, pinned_states, states),
        ):
            slabs += -(-(pool.in_use_with(pinned) + needed) // (pool.per_slab or 1))
        return slabs < len(self._slabs.kinds)

    def _fits(self, blocks: int, states: int, records: int) -> bool:
        slabs = self._blocks.new_slabs(blocks) + self._states.new_slabs(states)
        return slabs + self._records.new_slabs(records) <= len(self._slabs.free)

    def generation(self, kind: SlabKind, slot: SlotId) -> int:
        """Return how often the slot has been allocated."""
        return self._pools[kind].generations[self._flat(kind, slot)]

    def check(self, kind: SlabKind, slot: SlotId, generation: int) -> None:
        """Raise IntegrityError unless the slot is still live in this generation."""
        flat = self._flat(kind, slot)
        if not self._pools[kind].is_current(flat, generation):
            current = self._pools[kind].generations[flat]
            live = "live" if flat in self._pools[kind].owners else "free"
            raise IntegrityError(
                f"{kind} {slot} is stale: handle of generation {generation}, now {live} in {current}"
            )

    def usage(self) -> ArenaUsage:
        layout, free = self.layout, len(self._slabs.free)
        slabs = len(self._slabs.kinds) - 1
        return ArenaUsage(
            capacity_bytes=slabs * layout.slab_bytes,
            block_bytes=self._blocks.in_use * layout.block_bytes,
            state_bytes=self._states.in_use * layout.state_bytes,
            record_bytes=self._records.in_use * layout.record_bytes,
            cached_block_bytes=self._blocks.num_evictable * layout.block_bytes,
            cached_state_bytes=self._states.num_evictable * layout.state_bytes,
            free_bytes=free * layout.slab_bytes,
            slabs=slabs,
            free_slabs=free,
            partial_slabs=sum(len(slabs) for pool in self._pools.values() for slabs in pool.partial),
        )

    def check_integrity(self) -> None:
        """Check that each byte has one owner and none is leaked; raise IntegrityError otherwise."""
        prove(self.layout, self._slabs, tuple(self._pools.values()))

    def check_owners(self, owners: Iterable[Owner] = ()) -> None:
        """Check integrity, and that no other owner holds anything."""
        self.check_integrity()
        live_owners = set(owners)
        for pool in self._pools.values():
            for owner, held in pool.held.items():
                if owner not in live_owners:
                    raise IntegrityError(f"owner {owner!r} is over but holds {len(held)} {pool.kind}s")

    def check_held(self, owner: Owner, blocks: Iterable[int], states: Iterable[int]) -> None:
        """Check that an owner holds exactly these slots."""
        for pool, slots in ((self._blocks, blocks), (self._states, states), (self._records, ())):
            held = set(pool.held.get(owner, ()))
            if held != set(slots):
                raise IntegrityError(
                    f"owner {owner!r} holds {pool.kind}s {sorted(held)}, not {sorted(slots)}"
                )

    def forget(self, keeping: Iterable[Owner] = ()) -> None:
        """Free every slot, after a failure that may have left operations incomplete.

        Owners in `keeping` retain only the slots that they do not share.
        """
        entries = [(pool, owner, pool.exclusive(owner)) for owner in keeping for pool in self._pools.values()]
        self._slabs.forget()
        for pool in self._pools.values():
            pool.forget()
        for pool, owner, slots in entries:
            pool.restore(owner, slots)

    @property
    def can_rest(self) -> bool:
        """True if its pages can be released and reused at the same addresses."""
        return CAN_RELEASE and self.data.device.type == "cpu"

    def give_back(self) -> None:
        """Release the pages of an arena without live slots to the system.

        Views and addresses stay valid: the first access gets new zero pages.
        """
        self.check_owners()
        release_pages(self.data)
        if self.mirror:
            self.mirror.gave_back()

    def _flat(self, kind: SlabKind, slot: SlotId) -> int:
        if isinstance(slot, int):
            assert kind is not SlabKind.RECORD, f"a record is named by its slab and place, not by {slot}"
            return slot
        assert kind is SlabKind.RECORD, f"a {kind} is named by one number, not by {slot}"
        slab, index = slot
        return slab * self.layout.records_per_slab + index
