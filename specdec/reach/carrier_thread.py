"""A carrier's thread: posts reads round-robin, polls them, and quarantines abandoned ones until they end."""

import atexit
import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace

import numpy as np

from specdec.reach.carrier import CarrierFigures, Indices, KVRead, ReadDescriptors, ReadLate, ReadLost
from specdec.reach.descriptors import PIECE_BYTES, Descriptors, pieces
from specdec.reach.wire import PeerLost, TransferUncertain, Wire, WireError, WireLink, WireTransfer

logger = logging.getLogger(__name__)

AHEAD, MOST_AHEAD = 2, 8
"""Pieces of a read in flight at once, if posting is asynchronous; more if they finish before the next poll.
Others from the same peer queue behind them."""
FIRST_PAUSE_S, LAST_PAUSE_S = 100e-6, 1e-3
"""Poll interval; doubles while nothing finishes."""
ATTACH_S = 30.0
"""Timeout of attaching: the thread may be copying, or recreating its agent."""
CLOSE_S = 10.0
"""Timeout for the thread to return from C++."""
CLOSED = "the carrier is closed"


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Limits of abandoned reads, beyond which the agent is deleted to end them."""

    part: float = 0.1
    """Fraction of the arena's bytes."""
    part_s: float = 1.0
    """Minimum age of a read for that limit: most abandoned ones end by themselves at once."""
    age_s: float = 120.0


@dataclass(slots=True, eq=False)
class _Peer:
    metadata: bytes
    plan: ReadDescriptors
    local: Descriptors
    remote: Descriptors
    link: WireLink
    ahead: int = AHEAD
    is_attached: bool = True


@dataclass(slots=True, eq=False)
class _InFlightRead:
    """A read in flight."""

    read: KVRead
    peer: _Peer
    rest: deque[Indices]
    num_bytes: int
    start_s: float
    end_s: float
    posted: deque[WireTransfer] = field(default_factory=deque)
    lost_s: float | None = None
    """Time at which it was abandoned; it is in quarantine since."""
    is_uncertain: bool = False
    """Whether only closing the wire ends it."""


class CarrierThread:
    """The carrier over any wire. Its thread opens the wire and makes all calls to it."""

    def __init__(
        self,
        name: str,
        open_wire: Callable[[], Wire],
        arena_bytes: int,
        *,
        quarantine: Quarantine | None = None,
        piece_bytes: int = PIECE_BYTES,
        close_s: float = CLOSE_S,
    ) -> None:
        """Block until the wire is open; raises if that fails."""
        self.name = name
        self._open_wire, self._arena_bytes = open_wire, arena_bytes
        self._quarantine, self._piece_bytes, self._close_s = quarantine or Quarantine(), piece_bytes, close_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        """Ensures that no call enters a closed inbox."""
        self._fault: str | None = None
        self._numbers = 0
        self._reads: dict[int, KVRead] = {}
        """All unfinished reads, including those in the inbox."""
        self._peers: dict[str, _Peer] = {}
        self._in_flight: dict[int, _InFlightRead] = {}
        self._figures = CarrierFigures()
        opened: Future[None] = Future()
        # Context variables of the creator, such as a name in log lines, also hold in the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, opened), name=f"specdec-reach-{name}", daemon=True
        )
        self._thread.start()
        if opened.exception():
            self._thread.join()
        opened.result()
        atexit.register(self.close)  # a thread in C++ at interpreter exit aborts the process

    @property
    def metadata(self) -> bytes:
        """Metadata with which a peer reads from this arena. Changes when the agent is recreated."""
        return self._metadata

    @property
    def figures(self) -> CarrierFigures:
        return self._figures

    def attach(self, peer: str, metadata: bytes, plan: ReadDescriptors) -> None:
        """Attach a peer, replacing any peer of this name. Raises ReadLost."""
        attached: Future[str | None] = Future()
        if not self._put(lambda: attached.set_result(self._attach(peer, metadata, plan))):
            raise ReadLost(f"{CLOSED}: {self._fault}")
        try:
            error = attached.result(ATTACH_S)
        except TimeoutError:
            error = f"no answer within {ATTACH_S:.0f} s"
        if error:
            raise ReadLost(f"peer {peer} cannot be attached: {error}")

    def detach(self, peer: str) -> None:
        """Detach a peer and abandon reads from it."""
        self._put(lambda: self._detach(peer, f"peer {peer} was detached"))

    def read(self, peer: str, indices: Indices, num_bytes: int, deadline_s: float) -> KVRead:
        """Start a read; after `deadline_s` seconds it is abandoned."""
        start_s = time.monotonic()
        with self._gate:
            self._numbers += 1
            read = KVRead(self._numbers)
            if self._fault is None:
                self._reads[read.id] = read
                end_s = start_s + deadline_s
                self._inbox.put(lambda: self._begin(read, peer, indices, num_bytes, start_s, end_s))
                return read
        _fail(read, f"{CLOSED}: {self._fault}")
        read.released.set_result(None)
        return read

    def give_up(self, read: KVRead) -> None:
        """Abandon a read: `done` raises; `over` is set when the transport has finished."""

        def end() -> None:
            in_flight = self._in_flight.get(read.id)
            if in_flight and in_flight.read is read:
                self._abandon(in_flight, "it was abandoned")
                self._finish_or_abandon(in_flight)

        self._put(end)

    def close(self) -> None:
        """Abandon all reads and delete the agent, in bounded time."""
        atexit.unregister(self.close)
        self._stop("it was closed")
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logger.error(
                "the carrier %s did not stop within %.0f s; the memory of its transfers stays allocated",
                self.name,
                self._close_s,
            )
            for read in tuple(self._reads.values()):
                _fail(read, CLOSED)

    def _put(self, task: Callable[[], None]) -> bool:
        with self._gate:
            if self._fault is None:
                self._inbox.put(task)
            return self._fault is None

    def _stop(self, fault: str) -> None:
        with self._gate:
            self._fault = self._fault or fault
            self._inbox.put(_wake)

    def _work(self, opened: "Future[None]") -> None:
        try:
            self._open()
        except BaseException as error:
            self._stop(str(error))
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            self._run()
        except Exception as failure:
            logger.critical("the carrier %s has stopped", self.name, exc_info=failure)
            self._stop(f"it has stopped: {failure!r}")
        finally:
            self._end()

    def _open(self) -> None:
        self._wire = self._open_wire()
        self._metadata = self._wire.metadata

    def _run(self) -> None:
        pause_s: float | None = None
        while self._fault is None:
            self._receive(pause_s)
            progressed = self._advance()
            self._end_quarantine()
            if not self._in_flight:
                pause_s = None
            else:
                pause_s = 0.0 if progressed else min(max(2 * (pause_s or 0.0), FIRST_PAUSE_S), LAST_PAUSE_S)

    def _receive(self, pause_s: float | None) -> None:
        """Run calls from the inbox, waiting up to `pause_s` for the first, without limit if None."""
        with contextlib.suppress(queue.Empty):
            self._inbox.get(timeout=pause_s)()
            while True:
                self._inbox.get_nowait()()

    def _end(self) -> None:
        """End every read; if the wire may still write, `over` stays unset."""
        self._receive(0.0)
        for read in tuple(self._reads.values()):
            _fail(read, f"{CLOSED}: {self._fault}")
        try:
            self._wire.close()
        except WireError as error:
            logger.error("memory that %s reads into was not released: %s", self.name, error)
            return
        self._drop_all()

    def _attach(self, name: str, metadata: bytes, plan: ReadDescriptors) -> str | None:
        """Attach a peer; return an error message or None."""
        if self._fault:
            return f"{CLOSED}: {self._fault}"
        self._detach(name, f"peer {name} was attached again")
        local = Descriptors(plan.local, self._piece_bytes)
        remote = Descriptors(plan.remote, self._piece_bytes)
        try:
            link = self._wire.attach(metadata, local.rows, remote.rows)
        except WireError as error:
            return str(error)
        self._peers[name] = _Peer(metadata, plan, local, remote, link)
        return None

    def _detach(self, name: str, reason: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.is_attached = False
        for in_flight in self._reads_from(peer):
            self._abandon(in_flight, reason)
            self._finish_or_abandon(in_flight)
        self._close_link(peer)

    def _reads_from(self, peer: _Peer) -> list[_InFlightRead]:
        return [in_flight for in_flight in self._in_flight.values() if in_flight.peer is peer]

    def _close_link(self, peer: _Peer) -> None:
        """Close a detached peer's link once it has no reads in flight."""
        if not peer.is_attached and not self._reads_from(peer):
            peer.link.close()

    def _begin(
        self, read: KVRead, name: str, indices: Indices, num_bytes: int, start_s: float, end_s: float
    ) -> None:
        if self._fault:
            return  # `_end` fails the read
        peer = self._peers.get(name)
        error = f"peer {name} is not attached" if peer is None else _mismatch(peer, indices, num_bytes)
        if peer is None or error:
            self._figures = replace(self._figures, lost=self._figures.lost + 1)
            _fail(read, error or "")
            self._finish(read)
            return
        unposted = deque(pieces(peer.local, peer.remote, indices))
        self._in_flight[read.id] = _InFlightRead(read, peer, unposted, num_bytes, start_s, end_s)

    def _advance(self) -> bool:
        """Poll every read and post a piece of each, round-robin; return whether any progressed."""
        progressed = False
        for in_flight in tuple(self._in_flight.values()):
            self._receive(0.0)
            if self._fault or in_flight.read.id not in self._in_flight:
                continue
            try:
                progressed |= self._post(in_flight)
                progressed |= self._poll(in_flight)
            except PeerLost as lost:
                self._drop_peer(in_flight.peer, str(lost))
            except TransferUncertain as failure:
                in_flight.is_uncertain = True
                self._abandon(in_flight, str(failure))
            except WireError as error:
                self._abandon(in_flight, str(error))
            self._finish_or_abandon(in_flight)
        return progressed

    def _poll(self, in_flight: _InFlightRead) -> bool:
        progressed = False
        while in_flight.posted and not in_flight.is_uncertain:
            if not in_flight.posted[0].is_done():
                return progressed
            in_flight.posted.popleft().release()
            progressed = True
        if progressed and in_flight.rest:
            in_flight.peer.ahead = min(in_flight.peer.ahead + 1, MOST_AHEAD)  # the network was idle
        return progressed

    def _post(self, in_flight: _InFlightRead) -> bool:
        """Post the next piece of a read, unless enough are in flight."""
        if not in_flight.rest or len(in_flight.posted) >= in_flight.peer.ahead:
            return False
        in_flight.posted.append(in_flight.peer.link.post(*in_flight.rest.popleft()))
        return True

    def _abandon(self, in_flight: _InFlightRead, reason: str, kind: type[ReadLost] = ReadLost) -> None:
        """Abandon a read; pieces in flight continue."""
        in_flight.rest.clear()
        if in_flight.lost_s is None:
            in_flight.lost_s = time.monotonic()
            self._count_quarantine(lost=1)
            _fail(in_flight.read, reason, kind)

    def _drop_peer(self, peer: _Peer, reason: str) -> None:
        """End all reads from a lost peer."""
        for name in [name for name, other in self._peers.items() if other is peer]:
            logger.warning("peer %s is lost: %s", name, reason)
            del self._peers[name]
        peer.is_attached = False
        for in_flight in self._reads_from(peer):
            for transfer in in_flight.posted:
                transfer.release()
            in_flight.posted.clear()
            in_flight.is_uncertain = False
            self._abandon(in_flight, reason)
            self._finish_or_abandon(in_flight)

    def _finish_or_abandon(self, in_flight: _InFlightRead) -> None:
        """Remove a finished read; abandon one past its deadline."""
        if in_flight.read.id not in self._in_flight:
            return
        now_s = time.monotonic()
        if (in_flight.rest or in_flight.posted) and in_flight.lost_s is None and now_s >= in_flight.end_s:
            self._abandon(
                in_flight, f"it took longer than {in_flight.end_s - in_flight.start_s:.1f} s", ReadLate
            )
        if in_flight.rest or in_flight.posted or in_flight.is_uncertain:
            return
        del self._in_flight[in_flight.read.id]
        if in_flight.lost_s is None:
            figures, took_s = self._figures, now_s - in_flight.start_s
            self._figures = replace(
                figures,
                reads=figures.reads + 1,
                bytes=figures.bytes + in_flight.num_bytes,
                seconds=figures.seconds + took_s,
            )
            in_flight.read.done.set_result(took_s)
        self._count_quarantine()
        self._finish(in_flight.read)
        self._close_link(in_flight.peer)

    def _count_quarantine(self, *, lost: int = 0) -> None:
        quarantined = self._quarantined_reads
        self._figures = replace(
            self._figures,
            lost=self._figures.lost + lost,
            quarantined=len(quarantined),
            quarantined_bytes=sum(in_flight.num_bytes for in_flight in quarantined),
        )

    @property
    def _quarantined_reads(self) -> list[_InFlightRead]:
        return [in_flight for in_flight in self._in_flight.values() if in_flight.lost_s is not None]

    def _end_quarantine(self) -> None:
        """Recreate the agent if abandoned reads hold too much memory or are too old."""
        quarantined, limits = self._quarantined_reads, self._quarantine
        if not quarantined:
            return
        age_s = time.monotonic() - min(in_flight.lost_s or 0.0 for in_flight in quarantined)
        is_large = self._figures.quarantined_bytes > limits.part * self._arena_bytes
        if age_s > limits.age_s or (is_large and age_s > limits.part_s):
            logger.warning(
                "%d reads that were given up, one %.1f s ago, may still write to %d bytes: "
                "recreating the agent of %s; reads in flight are lost",
                len(quarantined),
                age_s,
                self._figures.quarantined_bytes,
                self.name,
            )
            self._renew()

    def _renew(self) -> None:
        """Delete the agent, which ends every read, then recreate it and attach its peers again."""
        for in_flight in tuple(self._in_flight.values()):
            self._abandon(in_flight, "the agent was recreated to end abandoned reads")
        self._wire.close()
        self._figures = replace(self._figures, agents=self._figures.agents + 1)
        peers, self._peers = self._peers, {}
        self._open()
        for name, peer in peers.items():
            if error := self._attach(name, peer.metadata, peer.plan):
                logger.warning("peer %s is lost: %s", name, error)
        self._drop_all()

    def _drop_all(self) -> None:
        """Fail all reads after the wire was closed."""
        in_flight = {*self._in_flight}
        self._in_flight.clear()
        self._count_quarantine()
        for read in tuple(self._reads.values()):
            if read.id in in_flight or self._fault:
                self._finish(read)

    def _finish(self, read: KVRead) -> None:
        del self._reads[read.id]
        read.released.set_result(None)


def _mismatch(peer: _Peer, indices: Indices, num_bytes: int) -> str | None:
    """Return why descriptors cannot be read, checked before any transfer, or None."""
    local, remote = indices
    if len(local) != len(remote):
        return f"{len(local)} descriptors cannot be read from {len(remote)}"
    if not peer.local.holds(local) or not peer.remote.holds(remote):
        return f"an index is out of range: {len(peer.local)} descriptors here, {len(peer.remote)} there"
    lengths = peer.local.lengths(local)
    if not np.array_equal(lengths, peer.remote.lengths(remote)):
        return "the descriptors of a pair differ in length"
    if (total := int(lengths.sum())) != num_bytes:
        return f"the descriptors hold {total} bytes, not {num_bytes}"
    return None


def _fail(read: KVRead, reason: str, kind: type[ReadLost] = ReadLost) -> None:
    """Fail a read; when closing a carrier whose thread hangs, both threads may do so at once."""
    with contextlib.suppress(InvalidStateError):
        read.done.set_exception(kind(reason))


def _wake() -> None:
    """Do nothing; it only wakes the thread."""
