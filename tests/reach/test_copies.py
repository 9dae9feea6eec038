"""Reads whose peer stalls, dies or is late, step by step, with copies within the process."""

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.errors import ConfigError
from specdec.reach.carrier import KVRead, ReadLost
from specdec.reach.carrier_thread import AHEAD, CarrierThread, Quarantine
from specdec.reach.descriptors import PIECE_BYTES
from specdec.reach.wire import TransferUncertain, WireError
from tests.reach.copies import Copies, CopyingLink, CopyingPiece, CopyingWire, Memory
from tests.reach.pairs import WholeSlots, arena, num_bytes, pick, until

LONG_S = 60.0
NEVER = Quarantine(part=2.0, age_s=1e9)


class Pair:
    """A reader and a peer, one arena each."""

    def __init__(self, quarantine: Quarantine = NEVER) -> None:
        self.there, self.here = arena(seed=1), arena()
        self.peer, self.reader = Copies(self.there), Copies(self.here, quarantine=quarantine)
        self.attach()

    def attach(self) -> None:
        plan = WholeSlots.between(self.here, self.there.data.data_ptr())
        self.reader.attach("P", self.peer.metadata, plan)

    def read(self, here: list[int], there: list[int], deadline_s: float = LONG_S) -> KVRead:
        size = num_bytes(self.here, len(here))
        return self.reader.read("P", pick(self.here, here, there), size, deadline_s)

    def stalled(self, here: list[int], there: list[int], deadline_s: float = LONG_S) -> KVRead:
        """Start a read, and return it once its pieces are in flight."""
        self.peer.stall()
        asked = self.peer.asked
        read = self.read(here, there, deadline_s)
        until(lambda: self.peer.asked > asked)
        return read

    def landed(self, block: int, source: int) -> bool:
        return torch.equal(self.here.block_bytes_X(block), self.there.block_bytes_X(source))

    def is_untouched(self, block: int) -> bool:
        return not self.here.block_bytes_X(block).any()

    def close(self) -> None:
        self.reader.close()
        self.peer.close()


@pytest.fixture
def pair():  # type: ignore[no-untyped-def]
    made = Pair()
    yield made
    made.close()


def test_a_stalled_read_fails_at_its_deadline_and_may_write_until_it_ends(pair: Pair) -> None:
    read = pair.stalled([7], [9], deadline_s=0.05)
    with pytest.raises(ReadLost, match="longer than"):
        read.done.result(LONG_S)
    assert not read.released.done()
    assert pair.is_untouched(7)
    figures = pair.reader.figures
    assert (figures.quarantined, figures.quarantined_bytes) == (1, num_bytes(pair.here, 1))
    pair.peer.go_on()
    read.released.result(LONG_S)
    assert pair.landed(7, 9)  # the late write: the slot had to be reserved until then
    assert pair.reader.figures.quarantined == 0
    assert pair.reader.figures.lost == 1


def test_a_read_given_up_is_lost_at_once_and_over_later(pair: Pair) -> None:
    read = pair.stalled([7], [9])
    pair.reader.give_up(read)
    with pytest.raises(ReadLost, match="abandoned"):
        read.done.result(LONG_S)
    assert not read.released.done()
    pair.peer.go_on()
    read.released.result(LONG_S)


def test_a_peer_that_dies_ends_its_reads_and_no_others(pair: Pair) -> None:
    other_there = arena(seed=2)
    other = Copies(other_there)
    pair.reader.attach("Q", other.metadata, WholeSlots.between(pair.here, other_there.data.data_ptr()))
    pair.peer.stall()
    other.stall()
    lost = [pair.read([7], [9]), pair.read([8], [10])]
    kept = pair.reader.read("Q", pick(pair.here, [20], [21]), num_bytes(pair.here, 1), LONG_S)
    pair.peer.die()
    for read in lost:
        with pytest.raises(ReadLost):
            read.done.result(LONG_S)
        read.released.result(LONG_S)
    assert pair.is_untouched(7)
    other.go_on()
    kept.done.result(LONG_S)
    assert torch.equal(pair.here.block_bytes_X(20), other_there.block_bytes_X(21))
    with pytest.raises(ReadLost, match="not attached"):
        pair.read([7], [9]).done.result(LONG_S)
    with pytest.raises(ReadLost, match="cannot be attached"):
        pair.attach()
    other.close()


def test_a_read_in_quarantine_of_a_peer_that_dies_is_over(pair: Pair) -> None:
    read = pair.stalled([7], [9])
    pair.reader.give_up(read)
    with pytest.raises(ReadLost):
        read.done.result(LONG_S)
    pair.peer.die()
    read.released.result(LONG_S)
    assert pair.is_untouched(7)


@pytest.mark.parametrize(
    "quarantine",
    [Quarantine(part=0.0, part_s=0.05, age_s=1e9), Quarantine(part=2.0, age_s=0.05)],
    ids=["size", "age"],
)
def test_a_long_quarantine_recreates_the_agent_and_no_late_byte_arrives(quarantine: Quarantine) -> None:
    pair = Pair(quarantine)
    other_there = arena(seed=2)
    other = Copies(other_there)
    pair.reader.attach("Q", other.metadata, WholeSlots.between(pair.here, other_there.data.data_ptr()))
    before = pair.reader.metadata
    other.stall()
    bystander = pair.reader.read("Q", pick(pair.here, [20], [21]), num_bytes(pair.here, 1), LONG_S)
    until(lambda: other.asked == 1)
    given_up = pair.stalled([7], [9])
    pair.reader.give_up(given_up)
    given_up.released.result(LONG_S)
    with pytest.raises(ReadLost, match="recreated"):
        bystander.done.result(LONG_S)
    bystander.released.result(LONG_S)
    pair.peer.go_on()
    other.go_on()
    pair.read([11], [12]).done.result(LONG_S)  # its peers were attached again
    again = pair.reader.read("Q", pick(pair.here, [22], [21]), num_bytes(pair.here, 1), LONG_S)
    again.done.result(LONG_S)
    assert pair.landed(11, 12)
    assert pair.is_untouched(7) and pair.is_untouched(20)
    assert pair.reader.metadata != before
    figures = pair.reader.figures
    assert (figures.agents, figures.quarantined, figures.lost, figures.reads) == (1, 0, 2, 2)
    other.close()
    pair.close()


def test_detached_with_reads_under_way(pair: Pair) -> None:
    read = pair.stalled([7], [9])
    pair.reader.detach("P")
    with pytest.raises(ReadLost, match="detached"):
        read.done.result(LONG_S)
    assert not read.released.done()
    pair.peer.go_on()
    read.released.result(LONG_S)


def test_a_peer_is_reattached_with_reads_in_flight(pair: Pair) -> None:
    read = pair.stalled([7], [9])
    again = Copies(pair.there)
    pair.reader.attach("P", again.metadata, WholeSlots.between(pair.here, pair.there.data.data_ptr()))
    with pytest.raises(ReadLost, match="attached again"):
        read.done.result(LONG_S)
    assert not read.released.done()
    pair.read([11], [12]).done.result(LONG_S)
    pair.peer.die()
    read.released.result(LONG_S)  # the end of the old link does not affect the new one
    pair.read([13], [12]).done.result(LONG_S)
    again.close()


def test_close_ends_reads_under_way(pair: Pair) -> None:
    pair.peer.stall()
    reads = [pair.read([n], [n]) for n in range(5, 9)]
    pair.reader.give_up(reads[0])
    pair.reader.close()
    for read in reads:
        with pytest.raises(ReadLost):
            read.done.result(0)
        read.released.result(0)
    pair.peer.go_on()
    assert all(pair.is_untouched(n) for n in range(5, 9))


def test_reads_are_posted_by_turns(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of reads alternate: a small read does not wait for the end of a large one."""
    both_wait, order = threading.Event(), []
    post = CopyingLink.post

    def recorded(self: CopyingLink, local: NDArray[np.int32], remote: NDArray[np.int32]) -> CopyingPiece:
        both_wait.wait(LONG_S)
        order.append(local.tolist())
        return post(self, local, remote)

    monkeypatch.setattr(CopyingLink, "post", recorded)
    monkeypatch.setattr("specdec.reach.descriptors.DESCRIPTOR_BYTES", PIECE_BYTES // 2)
    blocks = list(range(64, 72))
    large, small = pair.read(blocks, blocks), pair.read([7], [9])
    both_wait.set()
    large.done.result(LONG_S)
    small.done.result(LONG_S)
    assert order[:3] == [[64, 65], [7], [66, 67]]
    assert [block for piece in order for block in piece] == [64, 65, 7, *blocks[2:]]


def test_an_agent_that_cannot_be_recreated_ends_the_carrier_and_releases_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(Quarantine(part=2.0, age_s=0.05))
    given_up, bystander = pair.stalled([7], [9]), pair.stalled([8], [9])

    def fail(self: CopyingWire, memory: Memory) -> None:
        raise ConfigError("no network any more", field="reach")

    with monkeypatch.context() as patched:
        patched.setattr(CopyingWire, "__init__", fail)
        pair.reader.give_up(given_up)
        given_up.released.result(LONG_S)
        bystander.released.result(LONG_S)
    pair.peer.go_on()
    with pytest.raises(ReadLost, match="no network any more"):
        pair.read([8], [9]).done.result(LONG_S)
    assert pair.is_untouched(7) and pair.is_untouched(8)
    pair.close()


def test_few_pieces_of_a_read_are_ahead(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """If posting returns early, a read does not post all of itself before the next one."""
    monkeypatch.setattr("specdec.reach.descriptors.DESCRIPTOR_BYTES", PIECE_BYTES)
    blocks = list(range(40, 80))
    pair.peer.stall()
    large = pair.read(blocks, blocks)
    until(lambda: pair.peer.asked == AHEAD)
    small = pair.read([7], [9])
    until(lambda: pair.peer.asked == AHEAD + 1)
    time.sleep(0.01)
    assert pair.peer.asked == AHEAD + 1
    pair.peer.go_on()
    small.done.result(LONG_S)
    large.done.result(LONG_S)


def test_calls_are_processed_between_two_rounds(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is given up while another one is copied is not started."""
    posts, goes_on = [], threading.Event()
    post = CopyingLink.post

    def recorded(self: CopyingLink, local: NDArray[np.int32], remote: NDArray[np.int32]) -> CopyingPiece:
        posts.append(local.tolist())
        goes_on.wait(LONG_S)
        return post(self, local, remote)

    monkeypatch.setattr(CopyingLink, "post", recorded)
    monkeypatch.setattr("specdec.reach.descriptors.DESCRIPTOR_BYTES", PIECE_BYTES)
    first = pair.read([7, 8], [9, 10])
    until(lambda: posts == [[7]])
    second = pair.read([20], [9])  # begins next to the first one's second piece
    third = pair.read([21], [9])
    pair.reader.give_up(third)
    goes_on.set()
    for read in (first, second):
        read.done.result(LONG_S)
    assert third.done.exception(LONG_S)
    assert sorted(block for piece in posts for block in piece) == [7, 8, 20]


def test_a_thread_that_is_stuck_holds_no_caller_up(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = arena(), arena(seed=1)
    peer = Copies(there)
    reader = CarrierThread("stuck", partial(CopyingWire, Memory(here.data)), here.data.nbytes, close_s=0.05)
    reader.attach("P", peer.metadata, WholeSlots.between(here, there.data.data_ptr()))
    stuck, goes_on = threading.Event(), threading.Event()

    def post(*_: object) -> CopyingPiece:
        stuck.set()
        goes_on.wait(LONG_S)
        raise TransferUncertain("it came back")

    monkeypatch.setattr(CopyingLink, "post", post)
    posted = reader.read("P", pick(here, [7], [9]), num_bytes(here, 1), LONG_S)
    stuck.wait(LONG_S)
    waiting = reader.read("P", pick(here, [8], [9]), num_bytes(here, 1), LONG_S)
    reader.close()
    for read in (posted, waiting):
        with pytest.raises(ReadLost, match="closed"):
            read.done.result(0)
        assert not read.released.done()  # it may still write
    goes_on.set()
    for read in (posted, waiting):
        read.released.result(LONG_S)
    peer.close()


def test_an_uncertain_transfer_keeps_its_memory_until_the_agent_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair(Quarantine(part=2.0, age_s=0.2))

    def fail(self: CopyingPiece) -> bool:
        raise TransferUncertain("the network said no")

    with monkeypatch.context() as patched:
        patched.setattr(CopyingPiece, "is_done", fail)
        read = pair.read([7], [9])
        with pytest.raises(ReadLost, match="said no"):
            read.done.result(LONG_S)
    assert pair.reader.figures.agents == 0 and not read.released.done()
    read.released.result(LONG_S)
    assert pair.reader.figures.agents == 1
    pair.read([7], [9]).done.result(LONG_S)
    pair.close()


def test_an_agent_that_cannot_be_deleted_gives_no_memory_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(Quarantine(part=2.0, age_s=0.05))
    read = pair.stalled([7], [9])

    def fail(self: CopyingWire) -> None:
        raise WireError("it is held")

    with monkeypatch.context() as patched:
        patched.setattr(CopyingWire, "close", fail)
        pair.reader.give_up(read)
        pair.reader._thread.join(LONG_S)
    assert read.done.exception(0) and not read.released.done()
    assert "was not released" in caplog.text
    after = pair.read([8], [9])
    with pytest.raises(ReadLost, match="it is held"):
        after.done.result(0)
    after.released.result(0)
    with pytest.raises(ReadLost, match="it is held"):
        pair.attach()
    pair.close()
