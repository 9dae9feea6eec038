"""Private slots for draft tokens of a window: two implementations of one interface.

A window begins with one slot per node. When it has been verified, the slots of the accepted path are what the
sequence has gained and all others go back to the arena. No state is copied either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.state_slots.arena import Arena
from specdec.state_slots.slots import Owner
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot, Row


@dataclass(frozen=True, slots=True)
class Committed:
    """What a sequence has committed: its state, and accepted records that the state does not hold yet."""

    state: int
    path: tuple[RecordSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """One row's window: the root, and below it what was drafted. Its slots are borrowed for this step."""

    tree: TokenTree
    slots: Sequence[Any]


class Backing(Protocol):
    arena: Arena

    def bytes_per_token(self) -> int:
        """Return what one node of a window borrows."""
        ...

    def has_room(self, nodes: int) -> bool:
        """Return whether `count` slots could be borrowed now."""
        ...

    def begin(self, owner: Owner, nodes: int) -> Sequence[Any] | None:
        """Borrow one slot per node; None when they do not fit. A model without states needs none."""
        ...

    def dress(self, row: Row, slots: Sequence[Any]) -> Row:
        """Put the slots that its nodes write into a row."""
        ...

    def promote(
        self, owner: Owner, before: Committed, slots: Sequence[Any], nodes: Sequence[int]
    ) -> Committed:
        """Keep the slots of accepted nodes, release the rest. `nodes` is a path from the root, if any."""
        ...


class RecordBacking:
    """A slot holds what its token adds to the state; the next window that reads the state folds it in."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def bytes_per_token(self) -> int:
        """Return what one node of a window borrows."""
        return self.arena.layout.record_bytes

    def has_room(self, nodes: int) -> bool:
        """Return whether `count` records could be borrowed now."""
        return not self.arena.layout.states or self.arena.can_take(records=nodes)

    def begin(self, owner: Owner, nodes: int) -> Sequence[RecordSlot] | None:
        """Borrow one record per node."""
        return self.arena.take_records(owner, nodes) if self.arena.layout.states else ()

    def dress(self, row: Row, slots: Sequence[RecordSlot]) -> Row:
        """Put the records that its nodes write into a row."""
        return row.writing(records=slots) if slots else row

    def promote(
        self, owner: Owner, before: Committed, slots: Sequence[RecordSlot], nodes: Sequence[int]
    ) -> Committed:
        """Make the accepted records the path. The path before was folded by the window that wrote them."""
        kept = tuple(slots[node] for node in nodes) if slots else ()
        self.arena.release_records(owner, [*before.path, *(slot for slot in slots if slot not in kept)])
        return Committed(before.state, kept)


class SnapshotBacking:
    """A slot holds the whole state after its token; the last accepted one becomes the sequence's own."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def bytes_per_token(self) -> int:
        """Return what one node of a window borrows: a state has a slab to itself."""
        return self.arena.layout.states_per_slab * self.arena.layout.slab_bytes

    def has_room(self, nodes: int) -> bool:
        """Return whether `count` states could be borrowed now."""
        return not self.arena.layout.states or self.arena.can_take(states=nodes)

    def begin(self, owner: Owner, nodes: int) -> Sequence[int] | None:
        """Borrow one state slot per node."""
        return self.arena.take_snapshots(owner, nodes) if self.arena.layout.states else ()

    def dress(self, row: Row, slots: Sequence[int]) -> Row:
        """Put the states that its nodes write into a row."""
        return row.writing(snapshots=slots) if slots else row

    def promote(
        self, owner: Owner, before: Committed, slots: Sequence[int], nodes: Sequence[int]
    ) -> Committed:
        """Swap the last accepted node's slot for the sequence's state."""
        assert not before.path
        last = slots[nodes[-1]] if slots and nodes else before.state
        for slot in (before.state, *slots):
            if slot != last:
                self.arena.release_state(owner, slot)
        return Committed(last)


def release_path(arena: Arena, owner: Owner, before: Committed) -> Committed:
    """Release a path's records once a prefill or a fold has updated the state."""
    if before.path:
        arena.release_records(owner, before.path)
    return Committed(before.state)


BACKINGS: dict[str, Callable[[Arena], Backing]] = {"record": RecordBacking, "snapshot": SnapshotBacking}
