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
        self._going: dict[int, _InFlightRead] = {}
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
            why = attached.result(ATTACH_S)
        except TimeoutError:
            why = f"no answer within {ATTACH_S:.0f} s"
        if why:
            raise ReadLost(f"peer {peer} cannot be attached: {why}")

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
        read.over.set_result(None)
        return read

    def give_up(self, read: KVRead) -> None:
        """Abandon a read: `done` raises; `over` is set when the transport has finished."""

        def end() -> None:
            going = self._going.get(read.id)
            if going and going.read is read:
                self._lose(going, "it was given up")
                self._settle(going)

        self._put(end)

    def close(self) -> None:
        """Abandon all reads and delete the agent, in bounded time."""
        atexit.unregister(self.close)
        self._stop("it was closed")
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            logger.error(
                "the carrier %s did not end within %.0f s; memory that it reads into is not given back",
                self.name,
                self._close_s,
            )
            for read in tuple(self._reads.values()):
                _fail(read, CLOSED)

    def _put(self, work: Callable[[], None]) -> bool:
        with self._gate:
            if self._fault is None:
                self._inbox.put(work)
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
            moved = self._advance()
            self._end_quarantine()
            if not self._going:
                pause_s = None
            else:
                pause_s = 0.0 if moved else min(max(2 * (pause_s or 0.0), FIRST_PAUSE_S), LAST_PAUSE_S)

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
            logger.error("memory that %s reads into is not given back: %s", self.name, error)
            return
        self._all_over()

    def _attach(self, name: str, metadata: bytes, plan: ReadDescriptors) -> str | None:
        """Attach a peer; return an error message or None."""
        if self._fault:
            return f"{CLOSED}: {self._fault}"
        self._detach(name, f"peer {name} was attached anew")
        local = Descriptors(plan.local, self._piece_bytes)
        remote = Descriptors(plan.remote, self._piece_bytes)
        try:
            link = self._wire.attach(metadata, local.rows, remote.rows)
        except WireError as error:
            return str(error)
        self._peers[name] = _Peer(metadata, plan, local, remote, link)
        return None

    def _detach(self, name: str, why: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        peer.is_attached = False
        for going in self._going_from(peer):
            self._lose(going, why)
            self._settle(going)
        self._close_link(peer)

    def _going_from(self, peer: _Peer) -> list[_InFlightRead]:
        return [going for going in self._going.values() if going.peer is peer]

    def _close_link(self, peer: _Peer) -> None:
        """Close a detached peer's link once it has no reads in flight."""
        if not peer.is_attached and not self._going_from(peer):
            peer.link.close()

    def _begin(
        self, read: KVRead, name: str, indices: Indices, num_bytes: int, start_s: float, end_s: float
    ) -> None:
        if self._fault:
            return  # `_end` fails the read
        peer = self._peers.get(name)
        why = f"peer {name} is not attached" if peer is None else _misfit(peer, indices, num_bytes)
        if peer is None or why:
            self._figures = replace(self._figures, lost=self._figures.lost + 1)
            _fail(read, why or "")
            self._over(read)
            return
        rest = deque(pieces(peer.local, peer.remote, indices))
        self._going[read.id] = _InFlightRead(read, peer, rest, num_bytes, start_s, end_s)

    def _advance(self) -> bool:
        """Poll every read and post a piece of each, round-robin; return whether any progressed."""
        moved = False
        for going in tuple(self._going.values()):
            self._receive(0.0)
            if self._fault or going.read.id not in self._going:
                continue
            try:
                moved |= self._post(going)
                moved |= self._poll(going)
            except PeerLost as gone:
                self._lose_peer(going.peer, str(gone))
            except TransferUncertain as failure:
                going.is_uncertain = True
                self._lose(going, str(failure))
            except WireError as error:
                self._lose(going, str(error))
            self._settle(going)
        return moved

    def _poll(self, going: _InFlightRead) -> bool:
        moved = False
        while going.posted and not going.is_uncertain:
            if not going.posted[0].has_landed():
                return moved
            going.posted.popleft().release()
            moved = True
        if moved and going.rest:
            going.peer.ahead = min(going.peer.ahead + 1, MOST_AHEAD)  # the network was idle
        return moved

    def _post(self, going: _InFlightRead) -> bool:
        """Post the next piece of a read, unless enough are in flight."""
        if not going.rest or len(going.posted) >= going.peer.ahead:
            return False
        going.posted.append(going.peer.link.post(*going.rest.popleft()))
        return True

    def _lose(self, going: _InFlightRead, why: str, kind: type[ReadLost] = ReadLost) -> None:
        """Abandon a read; pieces in flight continue."""
        going.rest.clear()
        if going.lost_s is None:
            going.lost_s = time.monotonic()
            self._count_quarantine(lost=1)
            _fail(going.read, why, kind)

    def _lose_peer(self, peer: _Peer, why: str) -> None:
        """End all reads from a lost peer."""
        for name in [name for name, known in self._peers.items() if known is peer]:
            logger.warning("peer %s is lost: %s", name, why)
            del self._peers[name]
        peer.is_attached = False
        for going in self._going_from(peer):
            for piece in going.posted:
                piece.release()
            going.posted.clear()
            going.is_uncertain = False
            self._lose(going, why)
            self._settle(going)

    def _settle(self, going: _InFlightRead) -> None:
        """Remove a finished read; abandon one past its deadline."""
        if going.read.id not in self._going:
            return
        now_s = time.monotonic()
        if (going.rest or going.posted) and going.lost_s is None and now_s >= going.end_s:
            self._lose(going, f"it took longer than {going.end_s - going.start_s:.1f} s", ReadLate)
        if going.rest or going.posted or going.is_uncertain:
            return
        del self._going[going.read.id]
        if going.lost_s is None:
            figures, took_s = self._figures, now_s - going.start_s
            self._figures = replace(
                figures,
                reads=figures.reads + 1,
                bytes=figures.bytes + going.num_bytes,
                seconds=figures.seconds + took_s,
            )
            going.read.done.set_result(took_s)
        self._count_quarantine()
        self._over(going.read)
        self._close_link(going.peer)

    def _count_quarantine(self, *, lost: int = 0) -> None:
        kept = self._kept
        self._figures = replace(
            self._figures,
            lost=self._figures.lost + lost,
            quarantined=len(kept),
            quarantined_bytes=sum(going.num_bytes for going in kept),
        )

    @property
    def _kept(self) -> list[_InFlightRead]:
        return [going for going in self._going.values() if going.lost_s is not None]

    def _end_quarantine(self) -> None:
        """Recreate the agent if abandoned reads hold too much memory or are too old."""
        kept, limits = self._kept, self._quarantine
        if not kept:
            return
        age_s = time.monotonic() - min(going.lost_s or 0.0 for going in kept)
        is_large = self._figures.quarantined_bytes > limits.part * self._arena_bytes
        if age_s > limits.age_s or (is_large and age_s > limits.part_s):
            logger.warning(
                "%d reads that were given up, one %.1f s ago, may still write to %d bytes: "
                "the agent of %s is made anew, and reads under way are lost",
                len(kept),
                age_s,
                self._figures.quarantined_bytes,
                self.name,
            )
            self._renew()

    def _renew(self) -> None:
        """Delete the agent, which ends every read, then recreate it and attach its peers again."""
        for going in tuple(self._going.values()):
            self._lose(going, "the agent was made anew, to end reads that were given up")
        self._wire.close()
        self._figures = replace(self._figures, agents=self._figures.agents + 1)
        peers, self._peers = self._peers, {}
        self._open()
        for name, peer in peers.items():
            if why := self._attach(name, peer.metadata, peer.plan):
                logger.warning("peer %s is lost: %s", name, why)
        self._all_over()

    def _all_over(self) -> None:
        """Drop all reads after the wire is closed."""
        going = {*self._going}
        self._going.clear()
        self._count_quarantine()
        for read in tuple(self._reads.values()):
            if read.id in going or self._fault:
                self._over(read)

    def _over(self, read: KVRead) -> None:
        del self._reads[read.id]
        read.over.set_result(None)


def _misfit(peer: _Peer, indices: Indices, num_bytes: int) -> str | None:
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


def _fail(read: KVRead, why: str, kind: type[ReadLost] = ReadLost) -> None:
    """Fail a read; when closing a carrier whose thread hangs, both threads may do so at once."""
    with contextlib.suppress(InvalidStateError):
        read.done.set_exception(kind(why))


def _wake() -> None:
    """Do nothing; it only wakes the thread."""
