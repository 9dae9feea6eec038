"""Allocate slots of one class from slabs shared by all classes: only bookkeeping, no bytes."""

from array import array
from collections.abc import Collection, Hashable, Iterable, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import NewType

RequestId = NewType("RequestId", int)
"""Id of a request within its engine."""
Owner = Hashable


class Evictable:
    """An owner that can be evicted: slots held by it alone count as free."""

    __slots__ = ()


class FixedOwner:
    """An owner whose slots another process accesses by address: they do not move."""

    __slots__ = ()


class SlabKind(StrEnum):
    """The classes that a slab can serve."""

    BLOCK = "block"
    STATE = "state"
    RECORD = "record"


class SlotSharers(dict[Owner, None]):
    """Owners of one shared slot."""


class SlabList:
    """The class of each slab, and a heap of free slabs, lowest first.

    Slab 0 is the dummy that padding rows of captured graphs read and write; it is never allocated.
    """

    def __init__(self, num_slabs: int) -> None:
        self.kinds: list[SlabKind | None] = [None] * num_slabs
        self.free = list(range(1, num_slabs))

    def open(self, kind: SlabKind) -> int:
        slab = heappop(self.free)
        self.kinds[slab] = kind
        return slab

    def forget(self) -> None:
        """Make every slab free."""
        self.kinds = [None] * len(self.kinds)
        self.free = list(range(1, len(self.kinds)))

    def reopen(self, slab: int, kind: SlabKind) -> None:
        """Assign a slab to a class again after `forget`."""
        if self.kinds[slab] is None:
            self.free.remove(slab)
            heapify(self.free)
            self.kinds[slab] = kind

    def close(self, slab: int) -> None:
        self.kinds[slab] = None
        heappush(self.free, slab)


class SlotPool:
    """Allocates the slots of one class; slot id = slab * per_slab + place.

    `held`, each owner's slots with their generations, is authoritative. The rest is derived from it and
    stored so that a call takes microseconds; integrity.py derives it again and compares.
    """

    def __init__(self, kind: SlabKind, per_slab: int, slabs: SlabList) -> None:
        self.kind = kind
        self.per_slab = per_slab
        self.slabs = slabs
        self.generations = array("q", bytes(8 * per_slab * len(slabs.kinds)))
        self.forget()

    def forget(self) -> None:
        """Free every slot, even with incomplete operations; the caller resets `slabs`.

        Generations are retained, so that earlier handles are stale.
        """
        self.held: dict[Owner, dict[int, int]] = {}
        self.handed_out = sum(self.generations)
        self.owners: dict[int, Owner | SlotSharers] = {}
        """Owners of each live slot. A list per slot would burden the garbage collector."""
        self.in_use = 0
        """Slots with at least one owner that is not evictable."""
        self.used: dict[int, int] = {}
        """Slab -> bitmap of its live slots; only slabs of this class."""
        self.partial: list[set[int]] = [set() for _ in range(self.per_slab)]
        """Partly used slabs by their number of live slots."""
        self.fullness = 0
        """Bit n is set if some partly used slab has n live slots."""
        self.spare = 0
        """Free slots in partly used slabs."""

    def restore(self, owner: Owner, slots: Sequence[int]) -> None:
        """Restore an owner's slots after `forget`, with the same generation."""
        for slot in slots:
            slab, index = divmod(slot, self.per_slab)
            self.slabs.reopen(slab, self.kind)
            self._file(slab, self.used.get(slab, 0) | 1 << index)
            self.owners[slot] = owner
            self.held.setdefault(owner, {})[slot] = self.generations[slot]
            self.in_use += not isinstance(owner, Evictable)

    def new_slabs(self, n: int) -> int:
        """Return the free slabs that `take` would open for n slots."""
        if n <= self.spare:
            return 0
        assert self.per_slab, f"this model has no {self.kind} slots"
        return -((self.spare - n) // self.per_slab)

    def take(self, owner: Owner, n: int, *, contiguous: bool = False) -> list[int] | None:
        """Allocate n slots, or return None and change nothing.

        Fullest slabs are used first, so that others empty out. `contiguous` prefers one slab if that opens no
        further one.
        """
        if self.new_slabs(n) > len(self.slabs.free):
            return None
        slots: list[int] = []
        while len(slots) < n:
            wanted = n - len(slots)
            slots += self._occupy(self._choose_slab(wanted if contiguous else 1), wanted)
        if slots:
            slots_held = self.held.setdefault(owner, {})
            for slot in slots:
                generation = self.generations[slot] + 1
                self.generations[slot] = slots_held[slot] = generation
                self.owners[slot] = owner
            self.handed_out += n
            self.in_use += 0 if isinstance(owner, Evictable) else n
        return slots

    def share(self, owner: Owner, slot: int) -> None:
        """Add an owner to a live slot."""
        assert slot in self.owners, f"{self.kind} {slot} is free and cannot be shared"
        held = self.held.setdefault(owner, {})
        assert slot not in held, f"owner {owner!r} holds {self.kind} {slot} already"
        held[slot] = self.generations[slot]
        if not isinstance(owner, Evictable):
            self.in_use += not self._is_used(slot)
        previous = self.owners[slot]
        if isinstance(previous, SlotSharers):
            previous[owner] = None
        else:
            self.owners[slot] = SlotSharers({previous: None, owner: None})

    def release(self, owner: Owner, slots: Sequence[int]) -> None:
        """Release slots; a slot is free without owners, a slab without live slots."""
        held = self.held.get(owner, {})
        assert len(set(slots)) == len(slots), f"a {self.kind} is released twice in {slots}"
        for slot in slots:  # check all before releasing any, so that a wrong call changes nothing
            assert slot in held, f"owner {owner!r} does not hold {self.kind} {slot}"
        freed: dict[int, int] = {}
        for slot in slots:
            del held[slot]
            owners = self.owners[slot]
            if isinstance(owners, SlotSharers):
                del owners[owner]
                if len(owners) == 1:
                    self.owners[slot] = next(iter(owners))
                if not isinstance(owner, Evictable):
                    self.in_use -= not self._is_used(slot)
            else:
                del self.owners[slot]
                self.in_use -= not isinstance(owner, Evictable)
                slab, index = divmod(slot, self.per_slab)
                freed[slab] = freed.get(slab, 0) | 1 << index
        for slab, bits in freed.items():
            self._file(slab, self.used[slab] & ~bits)
        if not held:
            self.held.pop(owner, None)

    def exclusive(self, owner: Owner) -> list[int]:
        """Return the slots that only this owner holds."""
        return [slot for slot in self.held.get(owner, ()) if len(self.owners_of(slot)) == 1]

    def release_owner(self, owner: Owner) -> None:
        if owner in self.held:
            self.release(owner, list(self.held[owner]))

    def evacuate(self) -> dict[int, int]:
        """Move the slots of the emptiest slab into holes of others, and free it; return the moves.

        Moves nothing if the others have too few holes, or an owner's slots must not move. The caller copies
        the bytes.
        """
        movable = (
            (n, slab) for n, slabs in enumerate(self.partial) for slab in slabs if self._may_move(slab)
        )
        fewest, slab = next(movable, (0, 0))
        if not fewest or fewest > self.spare - (self.per_slab - fewest):
            return {}
        used, first = self.used[slab], slab * self.per_slab
        self._file(slab, 0)
        moved = {}
        for slot in (first + index for index in range(self.per_slab) if used >> index & 1):
            (target,) = self._occupy(self._choose_slab(1), 1)
            moved[slot] = target
            self.generations[target] += 1
            self.owners[target] = self.owners.pop(slot)
            for owner in self.owners_of(target):
                del self.held[owner][slot]
                self.held[owner][target] = self.generations[target]
        self.handed_out += len(moved)
        return moved

    def _may_move(self, slab: int) -> bool:
        used, first = self.used[slab], slab * self.per_slab
        slots = (first + index for index in range(self.per_slab) if used >> index & 1)
        return not any(isinstance(owner, FixedOwner) for slot in slots for owner in self.owners_of(slot))

    @property
    def num_evictable(self) -> int:
        """Number of slots with only evictable owners; any thread may read it."""
        return max(len(self.owners) - self.in_use, 0)

    def is_current(self, slot: int, generation: int) -> bool:
        return slot in self.owners and self.generations[slot] == generation

    def owners_of(self, slot: int) -> Collection[Owner]:
        """Return the owners of a live slot."""
        owners = self.owners[slot]
        return owners.keys() if isinstance(owners, SlotSharers) else (owners,)

    def in_use_with(self, slots: Iterable[int]) -> int:
        """Return the slots in use if these live ones were too."""
        return self.in_use + sum(not self._is_used(slot) for slot in slots)

    def _is_used(self, slot: int) -> bool:
        return not all(isinstance(owner, Evictable) for owner in self.owners_of(slot))

    def _choose_slab(self, wanted: int) -> int:
        """Return the fullest slab with `wanted` free slots, else the fullest of several, else a new one."""
        fits = self.fullness & ((2 << max(self.per_slab - wanted, 0)) - 1)
        if not fits and wanted > self.spare:
            return self.slabs.open(self.kind)
        return next(iter(self.partial[(fits or self.fullness).bit_length() - 1]))

    def _occupy(self, slab: int, wanted: int) -> list[int]:
        """Mark up to `wanted` free slots of a slab as live and return their ids."""
        used = self.used.get(slab, 0)
        free = ~used & ((1 << self.per_slab) - 1)
        indices = _lowest(free, min(wanted, free.bit_count()))
        for index in indices:
            used |= 1 << index
        self._file(slab, used)
        first = slab * self.per_slab
        return [first + index for index in indices]

    def _file(self, slab: int, used: int) -> None:
        """Store a slab's new bitmap; free the slab if nothing in it is live."""
        previous, live = self.used.get(slab, 0).bit_count(), used.bit_count()
        if 0 < previous < self.per_slab:
            self.partial[previous].remove(slab)
            self.spare -= self.per_slab - previous
            if not self.partial[previous]:
                self.fullness &= ~(1 << previous)
        if 0 < live < self.per_slab:
            self.partial[live].add(slab)
            self.spare += self.per_slab - live
            self.fullness |= 1 << live
        if live:
            self.used[slab] = used
        else:
            del self.used[slab]
            self.slabs.close(slab)


def _lowest(free: int, n: int) -> Sequence[int]:
    """Return the lowest n adjacent set bits, or the lowest n set bits if no n are adjacent."""
    starts, length = free, 1
    while starts and length < n:
        step = min(length, n - length)
        starts &= starts >> step
        length += step
    if starts:
        first = (starts & -starts).bit_length() - 1
        return range(first, first + n)
    indices = []
    for _ in range(n):
        lowest = free & -free
        indices.append(lowest.bit_length() - 1)
        free ^= lowest
    return indices
