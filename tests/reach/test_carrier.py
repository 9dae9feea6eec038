"""The contract of every carrier, for copies within the process and for two NIXL agents in it."""

import contextlib
import threading

import numpy as np
import pytest
import torch

from specdec.reach.carrier import Carrier, KVRead, ReadLost
from specdec.state_slots.arena import Arena
from specdec.state_slots.layout import KVShape, Layout, StateShape
from tests.reach.conftest import Make, each_carrier
from tests.reach.pairs import WholeSlots, arena, num_bytes, pick

pytestmark = each_carrier
LONG_S = 60.0


class Pair:
    """A reader and its peer."""

    def __init__(self, make: Make, *, layout: Layout | None = None, slabs: int = 24, **options: int) -> None:
        sizes = {"slabs": slabs} | ({"layout": layout} if layout else {})
        self.there, self.here = arena(seed=1, **sizes), arena(**sizes)  # type: ignore[arg-type]
        self.peer, self.reader = make(self.there), make(self.here, **options)
        self.attach("P")

    def attach(self, name: str) -> None:
        plan = WholeSlots.between(self.here, self.there.data.data_ptr())
        self.reader.attach(name, self.peer.metadata, plan)

    def read(
        self, here: list[int], there: list[int], states: tuple[int, int] | None = None, name: str = "P"
    ) -> KVRead:
        size = num_bytes(self.here, len(here), states is not None)
        return self.reader.read(name, pick(self.here, here, there, states), size, LONG_S)


def lost(read: KVRead, why: str) -> None:
    with pytest.raises(ReadLost, match=why):
        read.done.result(LONG_S)
    read.released.result(LONG_S)


def test_a_read_brings_its_blocks_and_its_state_and_nothing_else(make: Make) -> None:
    pair = Pair(make)
    carrier: Carrier = pair.reader
    here, there = [5, 41, 7, 6], [9, 8, 90, 10]
    read = pair.read(here, there, states=(12, 3))
    assert read.done.result(LONG_S) > 0
    read.released.result(LONG_S)
    expected = arena()
    for to, source in zip(here, there, strict=True):
        expected.block_bytes_X(to).copy_(pair.there.block_bytes_X(source))
    expected.state_bytes_X(12).copy_(pair.there.state_bytes_X(3))
    assert torch.equal(pair.here.data, expected.data)
    figures = carrier.figures
    assert (figures.reads, figures.bytes) == (1, num_bytes(pair.here, 4, 1))
    assert figures.seconds > 0
    assert (figures.lost, figures.quarantined, figures.quarantined_bytes, figures.agents) == (0, 0, 0, 0)


def test_a_slot_larger_than_a_piece_arrives_whole(make: Make) -> None:
    pair = Pair(make, piece_bytes=1000)
    pair.read([5, 6], [9, 8], states=(12, 3)).done.result(LONG_S)
    assert torch.equal(pair.here.state_bytes_X(12), pair.there.state_bytes_X(3))
    assert torch.equal(pair.here.block_bytes_X(6), pair.there.block_bytes_X(8))
    assert not pair.here.state_bytes_X(13).any() and not pair.here.state_bytes_X(11).any()


@pytest.mark.parametrize(
    ("kv", "states"),
    [((KVShape(heads=2, dim=4),), ()), ((), (StateShape(2, 4, 4, 3, 24),))],
    ids=["attention alone", "states alone"],
)
def test_models_of_one_kind_of_layer(
    make: Make, kv: tuple[KVShape, ...], states: tuple[StateShape, ...]
) -> None:
    layout = Layout(kv=kv, states=states, dtype=torch.bfloat16)
    there, here = arena(seed=1, layout=layout, slabs=8), arena(layout=layout, slabs=8)
    size = here.layout.block_bytes or here.layout.state_bytes
    stride = here.layout.block_bytes or here.layout.slab_bytes

    def only(base: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.array([(base, size, 0, stride, here.data.nbytes // stride)], dtype=np.int64)

    peer, reader = make(there), make(here)
    reader.attach("P", peer.metadata, WholeSlots(only(here.data.data_ptr()), only(there.data.data_ptr())))
    index = np.array([5], dtype=np.int32), np.array([6], dtype=np.int32)
    reader.read("P", index, size, LONG_S).done.result(LONG_S)
    at = 5 * stride, 6 * stride
    assert torch.equal(here.data[at[0] : at[0] + size], there.data[at[1] : at[1] + size])


def test_many_reads_at_once_from_many_threads(make: Make) -> None:
    pair = Pair(make)
    other_there = arena(seed=2)
    other = make(other_there)
    pair.reader.attach("Q", other.metadata, WholeSlots.between(pair.here, other_there.data.data_ptr()))
    reads: list[tuple[int, Arena, KVRead]] = []

    def ask(first: int) -> None:
        for block in range(first, 92, 4):
            name, source = ("P", pair.there) if block % 8 < 4 else ("Q", other_there)
            reads.append((block, source, pair.read([block], [block], name=name)))

    threads = [threading.Thread(target=ask, args=(4 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 88
    for block, source, read in reads:
        read.done.result(LONG_S)
        assert torch.equal(pair.here.block_bytes_X(block), source.block_bytes_X(block))
    assert pair.reader.figures.reads == 88
    assert len({read.id for _, _, read in reads}) == 88


def test_a_read_of_nothing_is_done(make: Make) -> None:
    pair = Pair(make)
    assert pair.read([], []).done.result(LONG_S) >= 0


@pytest.mark.parametrize(
    ("here", "there", "size", "why"),
    [
        ([5], [1000], 1, "out of range"),
        ([1000], [5], 1, "out of range"),
        ([-1], [5], 1, "out of range"),
        ([5], [-1], 1, "out of range"),
        ([5, 6], [5], 2, "2 descriptors cannot be read from 1"),
        ([5, 6], [5, 6], 1, "the descriptors hold 2048 bytes, not 1024"),
        ([5], [96], 1, "differ in length"),
    ],
)
def test_mismatched_reads_are_refused_before_any_transfer(
    make: Make, here: list[int], there: list[int], size: int, why: str
) -> None:
    pair = Pair(make)
    indices = np.array(here, dtype=np.int32), np.array(there, dtype=np.int32)
    lost(pair.reader.read("P", indices, num_bytes(pair.here, size), LONG_S), why)
    assert not pair.here.data.any()
    assert pair.reader.figures.lost == 1
    pair.read([5], [9]).done.result(LONG_S)


def test_an_unknown_peer(make: Make) -> None:
    pair = Pair(make)
    lost(pair.read([5], [9], name="Q"), "peer Q is not attached")
    pair.reader.detach("Q")


def test_metadata_of_nothing_is_refused(make: Make) -> None:
    pair = Pair(make)
    plan = WholeSlots.between(pair.here, pair.there.data.data_ptr())
    for metadata in (b"", b"junk", b"DRAMjunk", make(arena()).metadata[:-20]):
        with pytest.raises(ReadLost, match="peer Q cannot be attached"):
            pair.reader.attach("Q", metadata, plan)
    pair.read([5], [9]).done.result(LONG_S)


def test_rows_beyond_the_peers_arena_are_refused(make: Make) -> None:
    pair = Pair(make)
    plan = WholeSlots.between(pair.here, pair.there.data.data_ptr() + 64)
    with pytest.raises(ReadLost, match="peer P cannot be attached"):
        pair.reader.attach("P", pair.peer.metadata, plan)
    lost(pair.read([5], [9]), "not attached")
    pair.attach("P")
    pair.read([5], [9]).done.result(LONG_S)


def test_detached_and_attached_again(make: Make) -> None:
    pair = Pair(make)
    pair.attach("Q")
    pair.read([4], [9]).done.result(LONG_S)
    pair.reader.detach("P")
    lost(pair.read([5], [9]), "not attached")
    pair.read([6], [9], name="Q").done.result(LONG_S)  # the same agent under another name stays attached
    pair.attach("P")
    pair.attach("P")
    pair.read([5], [9]).done.result(LONG_S)
    assert torch.equal(pair.here.block_bytes_X(5), pair.there.block_bytes_X(9))


def test_a_peer_with_two_names_can_be_read_by_both(make: Make) -> None:
    pair = Pair(make)
    pair.attach("Q")
    pair.read([5], [9]).done.result(LONG_S)
    pair.read([6], [8], name="Q").done.result(LONG_S)
    pair.reader.detach("Q")
    lost(pair.read([7], [8], name="Q"), "not attached")
    pair.read([7], [10]).done.result(LONG_S)
    assert torch.equal(pair.here.block_bytes_X(7), pair.there.block_bytes_X(10))


def test_a_recreated_peer_is_attached_again(make: Make) -> None:
    pair = Pair(make)
    pair.read([5], [9]).done.result(LONG_S)
    pair.peer.close()
    # Shared memory outlives the agent that registered it; copies and sockets do not.
    with contextlib.suppress(ReadLost):
        pair.read([5], [9]).done.result(LONG_S)
    pair.there = arena(seed=3)
    pair.peer = make(pair.there)
    pair.attach("P")
    pair.read([6], [10]).done.result(LONG_S)
    assert torch.equal(pair.here.block_bytes_X(6), pair.there.block_bytes_X(10))


def test_a_read_that_is_done_cannot_be_given_up(make: Make) -> None:
    pair = Pair(make)
    read = pair.read([5], [9])
    read.released.result(LONG_S)
    pair.reader.give_up(read)
    pair.read([6], [9]).released.result(LONG_S)
    assert read.done.exception() is None
    assert pair.reader.figures.lost == 0


def test_waiting_tasks_cannot_cancel_the_futures(make: Make) -> None:
    """An event loop cancels the future that a cancelled task awaits; the thread still has to complete it."""
    pair = Pair(make)
    read = pair.read([5], [9])
    assert not read.done.cancel() and not read.released.cancel()
    read.released.result(LONG_S)


def test_closed(make: Make) -> None:
    pair = Pair(make)
    pair.reader.close()
    pair.reader.close()
    lost(pair.read([5], [9]), "the carrier is closed")
    with pytest.raises(ReadLost, match="the carrier is closed"):
        pair.attach("P")
    pair.reader.detach("P")
    assert not pair.here.data.any()


def test_close_while_reads_begin(make: Make) -> None:
    pair = Pair(make)
    reads = [pair.read([block], [block]) for block in range(4, 90)]
    pair.reader.close()
    for read in reads:
        assert read.done.done()
        read.released.result(0)
