"""NIXL between processes: peers that are killed, stopped or restarted; agents that are deleted."""

import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from specdec.errors import ConfigError
from specdec.reach.carrier import KVRead, ReadLost
from specdec.reach.carrier_thread import CarrierThread, Quarantine
from specdec.reach.nixl import AgentWire, Nixl, load_nixl
from specdec.reach.wire import WireError
from specdec.state_slots.arena import Arena
from tests.imports import ROOT
from tests.reach.conftest import Make, needs_nixl
from tests.reach.pairs import WholeSlots, arena, num_bytes, pick, until
from tests.reach.processes import Peer
from tests.selection import EXHAUSTIVE

pytestmark = needs_nixl
LONG_S = 120.0
SLABS = 2048
"""8 MiB: more than socket buffers hold."""
ALL = list(range(4, 4 * SLABS))
SEED = 1
NEVER = Quarantine(part=2.0, age_s=1e9)

Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a peer."""
    peers: list[Peer] = []

    def run(seed: int = SEED) -> Peer:
        peers.append(Peer(seed=seed, slabs=SLABS))
        return peers[-1]

    yield run
    for peer in peers:
        peer.kill()


@pytest.fixture
def _sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use TCP, over which a peer has to send: in shared memory even a stopped peer is readable."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


sockets = pytest.mark.usefixtures("_sockets")


def attach(reader: CarrierThread, here: Arena, peer: Peer, name: str = "P") -> None:
    reader.attach(name, peer.metadata, WholeSlots.between(here, peer.base))


def read(
    reader: CarrierThread, here: Arena, blocks: list[int], limit_s: float = LONG_S, name: str = "P"
) -> KVRead:
    return reader.read(name, pick(here, blocks, blocks), num_bytes(here, len(blocks)), limit_s)


def landed(here: Arena, seed: int = SEED) -> bool:
    """Return whether all blocks but those of the first slab are the peer's."""
    start = here.layout.slab_bytes
    return torch.equal(here.data[start:], arena(seed=seed, slabs=SLABS).data[start:])


def lost(read: KVRead, why: str) -> None:
    with pytest.raises(ReadLost, match=why):
        read.done.result(LONG_S)


@pytest.mark.parametrize("transports", ["all", "tcp,self"])
def test_two_processes(make: Make, start: Start, monkeypatch: pytest.MonkeyPatch, transports: str) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    here, peer = arena(slabs=SLABS), start()
    reader = make(here)
    attach(reader, here, peer)
    read(reader, here, ALL).done.result(LONG_S)
    assert landed(here)


@sockets
@EXHAUSTIVE
def test_a_peer_killed_during_a_read(make: Make, start: Start) -> None:
    here, peer, other = arena(slabs=SLABS), start(), start(seed=2)
    reader = make(here, quarantine=NEVER)
    attach(reader, here, peer)
    attach(reader, here, other, name="Q")
    read(reader, here, [5]).done.result(LONG_S)
    peer.stop()
    under_way = [read(reader, here, ALL), read(reader, here, ALL)]
    given_up = read(reader, here, ALL, limit_s=0.3)
    lost(given_up, "longer than")
    assert not given_up.released.done()
    peer.kill()
    for it in under_way:
        lost(it, "NIXL_ERR_REMOTE_DISCONNECT")
    for it in (*under_way, given_up):
        it.released.result(LONG_S)
    assert reader.figures.agents == 0 and reader.figures.quarantined == 0
    here.data.zero_()  # it may be reused now
    lost(read(reader, here, ALL), "not attached")
    other_read = read(reader, here, ALL, name="Q")
    other_read.done.result(LONG_S)
    assert landed(here, seed=2)
    again = start(seed=3)
    attach(reader, here, again)
    read(reader, here, ALL).done.result(LONG_S)
    assert landed(here, seed=3)


def test_a_peer_killed_before_a_read(make: Make, start: Start) -> None:
    here, peer = arena(slabs=SLABS), start()
    reader = make(here)
    attach(reader, here, peer)
    read(reader, here, [5]).done.result(LONG_S)
    peer.kill()
    it = read(reader, here, [6])
    lost(it, "NIXL_ERR_REMOTE_DISCONNECT")
    it.released.result(LONG_S)


@sockets
def test_a_read_from_a_stopped_peer_ends_only_after_its_last_byte(make: Make, start: Start) -> None:
    here, peer = arena(slabs=SLABS), start()
    reader = make(here, quarantine=NEVER)
    attach(reader, here, peer)
    read(reader, here, [5]).done.result(LONG_S)
    peer.stop()
    it = read(reader, here, ALL, limit_s=0.2)
    lost(it, "longer than 0.2 s")
    late = here.block_bytes_X(ALL[0])
    assert not it.released.done() and not late.any()
    assert reader.figures.quarantined_bytes == num_bytes(here, len(ALL))
    peer.go_on()
    it.released.result(LONG_S)
    assert torch.equal(late, arena(seed=SEED, slabs=SLABS).block_bytes_X(ALL[0]))  # written nevertheless
    assert reader.figures.quarantined == 0


@sockets
def test_a_peer_detached_during_a_read_is_disconnected_after_it(make: Make, start: Start) -> None:
    here, peer = arena(slabs=SLABS), start()
    reader = make(here, quarantine=NEVER)
    attach(reader, here, peer)
    read(reader, here, [5]).done.result(LONG_S)
    peer.stop()
    it = read(reader, here, ALL)
    time.sleep(0.1)
    reader.detach("P")
    lost(it, "detached")
    assert not it.released.done()
    peer.go_on()
    it.released.result(LONG_S)
    attach(reader, here, peer)
    read(reader, here, ALL).done.result(LONG_S)
    assert landed(here)


@sockets
@EXHAUSTIVE
def test_no_late_byte_arrives_after_the_agent_is_recreated(make: Make, start: Start) -> None:
    here, peer, other = arena(slabs=SLABS), start(), start(seed=2)
    reader = make(here, quarantine=Quarantine(part=0.1, part_s=0.1))
    attach(reader, here, peer)
    attach(reader, here, other, name="Q")
    for name in "PQ":
        read(reader, here, [5], name=name).done.result(LONG_S)
    peer.stop()
    it = read(reader, here, ALL, limit_s=0.2)
    lost(it, "longer than 0.2 s")
    it.released.result(LONG_S)
    assert reader.figures.agents == 1
    here.data.fill_(7)  # another owner's bytes
    peer.go_on()
    time.sleep(1.0)
    assert (here.data == 7).all()
    read(reader, here, ALL, name="Q").done.result(LONG_S)
    assert landed(here, seed=2)


@sockets
@EXHAUSTIVE
def test_close_during_a_read_from_a_stopped_peer(make: Make, start: Start) -> None:
    here, peer = arena(slabs=SLABS), start()
    reader = make(here)
    attach(reader, here, peer)
    read(reader, here, [5]).done.result(LONG_S)
    peer.stop()
    it = read(reader, here, ALL)
    time.sleep(0.1)
    reader.close()
    lost(it, "closed")
    it.released.result(0)
    here.data.fill_(7)
    peer.go_on()
    time.sleep(0.5)
    assert (here.data == 7).all()


@sockets
@EXHAUSTIVE
def test_a_peer_that_is_stopped_when_it_is_attached(make: Make, start: Start) -> None:
    here, peer = arena(slabs=SLABS), start()
    peer.stop()
    reader = make(here, quarantine=NEVER)
    attach(reader, here, peer)
    it = read(reader, here, ALL, limit_s=0.2)
    lost(it, "longer than")
    peer.go_on()
    it.released.result(LONG_S)


@sockets
@EXHAUSTIVE
def test_a_recreated_agent_is_reached_by_its_new_metadata(make: Make, start: Start) -> None:
    """Reads from an engine fail when that engine has to end reads of its own."""
    here, peer, third = arena(slabs=SLABS), start(), arena(slabs=SLABS)
    middle = make(here, quarantine=Quarantine(part=0.1, part_s=0.1))
    reader = make(third)
    attach(middle, here, peer)
    read(middle, here, ALL).done.result(LONG_S)
    reader.attach("M", middle.metadata, WholeSlots.between(third, here.data.data_ptr()))
    read(reader, third, [5], name="M").done.result(LONG_S)
    peer.stop()
    old = middle.metadata
    read(middle, here, ALL, limit_s=0.1).released.result(LONG_S)
    assert middle.metadata != old
    gone = read(reader, third, ALL, name="M")
    lost(gone, "NIXL_ERR")
    gone.released.result(LONG_S)
    reader.attach("M", middle.metadata, WholeSlots.between(third, here.data.data_ptr()))
    read(reader, third, ALL, name="M").done.result(LONG_S)
    assert torch.equal(third.data[third.layout.slab_bytes :], here.data[here.layout.slab_bytes :])


def _threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_carriers_leave_no_thread_and_no_file_behind() -> None:
    there, here = arena(seed=SEED), arena()

    def once() -> tuple[int, int]:
        peer, reader = Nixl(there), Nixl(here, quarantine=Quarantine(part=0.0, part_s=0.0))
        reader.attach("P", peer.metadata, WholeSlots.between(here, there.data.data_ptr()))
        read(reader, here, [5]).done.result(LONG_S)
        most = _threads_and_files()
        reader.close()
        peer.close()
        return most

    once()
    before = _threads_and_files()
    most = [once() for _ in range(4)]
    # A thread may take time to end, at either count.
    until(lambda: all(now <= then for now, then in zip(_threads_and_files(), before, strict=True)))
    assert max(most)[0] - before[0] <= 6  # two of each carrier, and transient ones of UCX


LEAVES = """
from tests.reach.pairs import WholeSlots, arena, num_bytes, pick, until
from specdec.reach.nixl import Nixl
there, here = arena(seed=1, slabs=2048), arena(slabs=2048)
peer, reader = Nixl(there), Nixl(here)
reader.attach("P", peer.metadata, WholeSlots.between(here, there.data.data_ptr()))
blocks = list(range(4, 8192))
reads = [reader.read("P", pick(here, blocks, blocks), num_bytes(here, len(blocks)), 60) for _ in range(20)]
reads[0].done.result()
"""


@sockets
@EXHAUSTIVE
def test_a_process_may_end_in_the_midst_of_reads() -> None:
    subprocess.run([sys.executable, "-c", LEAVES], cwd=ROOT, check=True, timeout=LONG_S)


@EXHAUSTIVE
def test_an_undeleted_agent_is_never_treated_as_deleted() -> None:
    """A carrier that cannot replace its agent closes it again at its end, and does not free its memory."""
    wire = AgentWire(load_nixl(), torch.zeros(4096, dtype=torch.uint8))
    kept = wire.agent.agent
    for _ in range(2):
        with pytest.raises(WireError, match="referred to"):
            wire.close()
    del kept
    wire.close()


def test_an_idle_carrier_sleeps(make: Make) -> None:
    """The agent's thread waits for events; as created by NIXL's own class it busies a core."""
    make(arena())
    start_s, cpu_s = time.monotonic(), time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu_s < 0.05 * (time.monotonic() - start_s)


def test_nixl_prints_nothing_and_leaves_logging_alone(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.raiseExceptions
    make(arena())
    assert capfd.readouterr().out == ""
    assert logging.raiseExceptions == before
    assert logging.getLogger("nixl").handlers == []


def test_a_missing_nixl_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"specdec\[reach\]") as caught:
        load_nixl()
    assert caught.value.field == "reach"


def test_an_agent_that_finds_no_network_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "nonsense")
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(ConfigError, match="UCX_NET_DEVICES"):
        Nixl(arena())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("specdec-reach")]
    capfd.readouterr()
