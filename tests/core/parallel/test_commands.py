"""Commands say exactly what rank 0 runs."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.parallel.commands import (
    Operation,
    pack_committed,
    pack_rows,
    packed,
    unpack_committed,
    unpack_rows,
    unpacked,
)
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row

IDS = st.integers(0, 2**40)
RECORDS = st.lists(st.tuples(IDS, IDS), max_size=3)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    count = draw(st.integers(1, 6))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, count)))
    tree = TokenTree(tuple(draw(st.lists(IDS, min_size=count, max_size=count))), parents)
    kind, slots = draw(st.integers(0, 2)), [(node, draw(IDS)) for node in range(count)]
    return Row(
        tree,
        draw(IDS),
        torch.tensor(draw(st.lists(IDS, max_size=4)), dtype=torch.int64),
        draw(IDS),
        draw(RECORDS),
        slots if kind == 1 else None,
        [slot for _, slot in slots] if kind == 2 else None,
        draw(IDS),
    )


@given(st.lists(rows(), max_size=3))
def test_rows_arrive_as_they_are(sent: list[Row]) -> None:
    operation, values = unpacked(packed(Operation.FORWARD, pack_rows(sent)))
    assert operation is Operation.FORWARD
    received = unpack_rows(values)
    assert len(received) == len(sent)
    for own, other in zip(sent, received, strict=True):
        assert own.table_N.dtype == other.table_N.dtype and torch.equal(own.table_N, other.table_N)
        for name in ("tree", "length", "state", "path", "records", "snapshots", "skipped"):
            assert getattr(own, name) == getattr(other, name)


@given(st.lists(st.builds(CommittedState, IDS, st.builds(tuple, RECORDS)), max_size=3))
def test_committed_states_arrive_as_they_are(sent: list[CommittedState]) -> None:
    assert unpack_committed(unpacked(packed(Operation.FOLD, pack_committed(sent)))[1]) == sent
