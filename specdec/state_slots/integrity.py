"""Check, using only the owners' slots, that every byte has one owner and none leaks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from specdec.state_slots.layout import Layout
from specdec.state_slots.slots import Evictable, FixedOwner, Owner, SlabKind, SlabList, SlotPool


class IntegrityError(AssertionError):
    """A bug in the arena or its caller; the message names the slot."""


def prove(layout: Layout, slabs: SlabList, pools: Sequence[SlotPool]) -> None:
    """Derive counts, bitmaps and free lists from the owners' slots, and compare with the stored ones.

    Slots of one class lie on a grid within their slab. So each byte has one owner if every slab has one
    class, every unshared slot has one holder, and the grid fits into the slab.
    """
    sizes = {
        SlabKind.BLOCK: layout.block_bytes,
        SlabKind.STATE: layout.state_bytes,
        SlabKind.RECORD: layout.record_bytes,
    }
    kinds: dict[int, SlabKind] = {}
    for pool in pools:
        if pool.per_slab * sizes[pool.kind] > layout.slab_bytes:
            raise IntegrityError(f"{pool.per_slab} {pool.kind}s overrun a slab of {layout.slab_bytes} bytes")
        owners = _holders(pool, len(slabs.kinds))
        _compare_owners(pool, owners)
        bitmaps = _bitmaps(pool, owners)
        for slab in bitmaps:
            kind = kinds.setdefault(slab, pool.kind)
            if kind is not pool.kind:
                raise IntegrityError(f"slab {slab} is in two classes: it holds {kind}s and {pool.kind}s")
        _compare_bitmaps(pool, bitmaps)
        _compare_partial(pool, bitmaps)
    _compare_slabs(slabs, kinds)
    _compare_free(slabs)


def _holders(pool: SlotPool, num_slabs: int) -> dict[int, list[Owner]]:
    """Return each slot's owners; check that handles are in range and of the slot's generation."""
    owners: dict[int, list[Owner]] = {}
    for owner, slots in pool.held.items():
        if not slots:
            raise IntegrityError(f"owner {owner!r} is listed for {pool.kind}s but holds none")
        for slot, generation in slots.items():
            if not pool.per_slab <= slot < num_slabs * pool.per_slab:
                raise IntegrityError(
                    f"{pool.kind} {slot} of owner {owner!r} lies outside the arena or in its dummy slab"
                )
            current = pool.generations[slot]
            if not 0 < generation == current:
                raise IntegrityError(
                    f"{pool.kind} {slot} of owner {owner!r} is stale: held as generation {generation}, "
                    f"handed out as {current}"
                )
            owners.setdefault(slot, []).append(owner)
    total = sum(pool.generations)
    if total != pool.handed_out:
        raise IntegrityError(
            f"{pool.kind}s are of {total} generations in all, but were handed out {pool.handed_out} times: "
            "a stale handle may pass for a live one"
        )
    return owners


def _compare_owners(pool: SlotPool, holders: Mapping[int, Sequence[Owner]]) -> None:
    for slot in holders.keys() | pool.owners.keys():
        held_by, owners = holders.get(slot, ()), pool.owners_of(slot) if slot in pool.owners else ()
        if len(held_by) != len(owners) or set(held_by) != set(owners):
            raise IntegrityError(f"{pool.kind} {slot} is held by {held_by} but listed for {list(owners)}")
        # Cached states and lent ones are only read.
        are_readers = pool.kind is SlabKind.STATE and all(
            isinstance(owner, Evictable | FixedOwner) for owner in owners
        )
        if len(owners) > 1 and pool.kind is not SlabKind.BLOCK and not are_readers:
            raise IntegrityError(f"{pool.kind} {slot} has {len(owners)} owners, and only blocks are shared")
    in_use = sum(any(not isinstance(owner, Evictable) for owner in owners) for owners in holders.values())
    if in_use != pool.in_use:
        raise IntegrityError(f"{in_use} {pool.kind}s are in use, but {pool.in_use} were counted")


def _bitmaps(pool: SlotPool, holders: Iterable[int]) -> dict[int, int]:
    bitmaps: dict[int, int] = {}
    for slot in holders:
        slab, index = divmod(slot, pool.per_slab)
        bitmaps[slab] = bitmaps.get(slab, 0) | 1 << index
    return bitmaps


def _compare_bitmaps(pool: SlotPool, bitmaps: dict[int, int]) -> None:
    for slab in bitmaps.keys() | pool.used.keys():
        live, recorded = bitmaps.get(slab, 0), pool.used.get(slab, 0)
        if live != recorded or not live:
            raise IntegrityError(
                f"slab {slab}: owners hold {pool.kind}s {live:#x}, the bitmap says {recorded:#x}"
            )


def _compare_partial(pool: SlotPool, bitmaps: dict[int, int]) -> None:
    """Check the index of partly used slabs and the count of free slots in them."""
    expected: list[set[int]] = [set() for _ in range(pool.per_slab)]
    spare = 0
    for slab, bitmap in bitmaps.items():
        count = bitmap.bit_count()
        if count < pool.per_slab:
            expected[count].add(slab)
            spare += pool.per_slab - count
    if expected != pool.partial:
        raise IntegrityError(f"slabs by live {pool.kind}s are {expected}, filed as {pool.partial}")
    fullness = sum(1 << count for count, slabs in enumerate(expected) if slabs)
    if fullness != pool.fullness:
        raise IntegrityError(f"fullness of the {pool.kind}s is {fullness:#x}, kept as {pool.fullness:#x}")
    if spare != pool.spare:
        raise IntegrityError(f"{spare} {pool.kind}s are spare in partly used slabs, counted {pool.spare}")


def _compare_slabs(slabs: SlabList, kinds: dict[int, SlabKind]) -> None:
    """Check that each slab except the dummy is free and listed once, or serves the class of its slots."""
    listed = Counter(slabs.free)
    for slab, recorded in enumerate(slabs.kinds):
        kind = kinds.get(slab)
        if kind is None and slab and not listed[slab]:
            raise IntegrityError(f"slab {slab} is leaked: nothing lives in it and it is not listed as free")
        if kind is not recorded:
            raise IntegrityError(
                f"slab {slab} holds {kind or 'nothing'} but is marked as {recorded or 'free'}"
            )
        if kind is not None and listed[slab]:
            raise IntegrityError(f"slab {slab} holds {kind}s and is listed as free")
        if listed[slab] > 1:
            raise IntegrityError(f"slab {slab} is listed as free {listed[slab]} times")


def _compare_free(slabs: SlabList) -> None:
    heap = slabs.free
    for slab in heap:
        if not 0 < slab < len(slabs.kinds):
            raise IntegrityError(f"slab {slab}, the dummy or none of the arena, is listed as free")
    for child in range(1, len(heap)):
        if heap[(child - 1) // 2] > heap[child]:
            raise IntegrityError(f"the free list is no heap at entry {child}")
