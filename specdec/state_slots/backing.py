"""Private slots for draft tokens of a window: two implementations of one interface.

A window starts with one slot per node. After verification, the slots of the accepted path belong to the
sequence and all others return to the arena. Neither implementation copies a state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.state_slots.arena import Arena
from specdec.state_slots.slots import Owner
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import RecordSlot, Row


@dataclass(frozen=True, slots=True)
class CommittedState:
    """A sequence's committed state, and accepted records that are not folded into it yet."""

    state: int
    path: tuple[RecordSlot, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """One row's window: the root and its drafts. Its slots are allocated for this step."""

    tree: TokenTree
    slots: Sequence[Any]


class Backing(Protocol):
    arena: Arena

    def has_room(self, nodes: int) -> bool:
        """Return whether `nodes` slots can be allocated now."""
        ...

    def begin(self, owner: Owner, nodes: int) -> Sequence[Any] | None:
        """Allocate one slot per node; None if they do not fit. A model without states needs none."""
        ...

    def with_slots(self, row: Row, slots: Sequence[Any]) -> Row:
        """Return a row whose nodes write these slots."""
        ...

    def promote(
        self, owner: Owner, committed: CommittedState, slots: Sequence[Any], nodes: Sequence[int]
    ) -> CommittedState:
        """Keep the slots of accepted nodes, release the rest. `nodes` is a path from the root, or empty."""
        ...


class RecordBacking:
    """Slots are records of state updates; the next window that loads the state folds them in."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def has_room(self, nodes: int) -> bool:
        """Return whether `nodes` records can be allocated now."""
        return not self.arena.layout.states or self.arena.can_take(records=nodes)

    def begin(self, owner: Owner, nodes: int) -> Sequence[RecordSlot] | None:
        """Allocate one record per node."""
        return self.arena.take_records(owner, nodes) if self.arena.layout.states else ()

    def with_slots(self, row: Row, slots: Sequence[RecordSlot]) -> Row:
        """Return a row whose nodes write these records."""
        return row.with_outputs(records=slots) if slots else row

    def promote(
        self, owner: Owner, committed: CommittedState, slots: Sequence[RecordSlot], nodes: Sequence[int]
    ) -> CommittedState:
        """Make the accepted records the path. The window that wrote them folded the previous path."""
        accepted = tuple(slots[node] for node in nodes) if slots else ()
        self.arena.release_records(
            owner, [*committed.path, *(slot for slot in slots if slot not in accepted)]
        )
        return CommittedState(committed.state, accepted)


class SnapshotBacking:
    """Slots are whole states after each token; the last accepted one becomes the sequence's state."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def has_room(self, nodes: int) -> bool:
        """Return whether `nodes` states can be allocated now."""
        return not self.arena.layout.states or self.arena.can_take(states=nodes)

    def begin(self, owner: Owner, nodes: int) -> Sequence[int] | None:
        """Allocate one state slot per node."""
        return self.arena.take_snapshots(owner, nodes) if self.arena.layout.states else ()

    def with_slots(self, row: Row, slots: Sequence[int]) -> Row:
        """Return a row whose nodes write these states."""
        return row.with_outputs(snapshots=slots) if slots else row

    def promote(
        self, owner: Owner, committed: CommittedState, slots: Sequence[int], nodes: Sequence[int]
    ) -> CommittedState:
        """Replace the sequence's state by the last accepted node's."""
        assert not committed.path
        last = slots[nodes[-1]] if slots and nodes else committed.state
        for slot in (committed.state, *slots):
            if slot != last:
                self.arena.release_state(owner, slot)
        return CommittedState(last)


def release_path(arena: Arena, owner: Owner, committed: CommittedState) -> CommittedState:
    """Release a path's records once a prefill or a fold has updated the state."""
    if committed.path:
        arena.release_records(owner, committed.path)
    return CommittedState(committed.state)


BACKINGS: dict[str, Callable[[Arena], Backing]] = {"record": RecordBacking, "snapshot": SnapshotBacking}
