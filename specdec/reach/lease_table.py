"""Leases of a lending engine: who may read which prompt's memory, and for how long."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from specdec.engine.kv_transfer import LentPrefix
from specdec.engine.transfers import PrefixLoan
from specdec.reach.bootstrap import BootstrapRooms
from specdec.reach.expiring_map import ExpiringMap
from specdec.reach.lease import TransferLease
from specdec.reach.messages import (
    ChecksumRequest,
    CloseRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    OpenRequest,
    OpenResponse,
)
from specdec.reach.protocol import LEASE_MAX_S, SILENCE_S, WAIT_S, PrefixIdentity, ReachError, Reason, new_id

MOST_LEASES = 1024
"""Maximum leases. Each is charged at least this fraction of the memory, so that the byte limit bounds leases
too."""
SWEEP_S = 1.0

Submit = Callable[[Callable[[LentPrefix], None]], PrefixLoan]
"""Starts lending a prompt; the argument is called in the engine thread on progress."""


@dataclass(slots=True)
class LeaseFigures:
    """Counts of leases since the engine was loaded; the first three are current values."""

    held: int = 0
    """Leases being prefilled, or held for their reader."""
    held_bytes: int = 0
    """As charged by `LeaseTable.charge`."""
    rooms_waiting: int = 0
    """Requests waiting for a room."""
    lent: int = 0
    opened: int = 0
    closed_intact: int = 0
    """Closed by a reader whose data are valid."""
    closed_not_intact: int = 0
    """Closed by a reader whose data are invalid."""
    closed_unread: int = 0
    """Closed by a reader that did not read."""
    ended: Counter[Reason] = field(default_factory=Counter)
    """Ended without a close by the reader, by reason."""
    refused: Counter[Reason] = field(default_factory=Counter)
    """Refused requests of the side channel, by reason."""


@dataclass(frozen=True, slots=True)
class _EndedLease:
    """Record of an ended lease, to repeat an answer that was lost."""

    reason: Reason
    reader: str | None
    intact: bool = False


def _no_sums(blocks: Sequence[int], state: int | None) -> list[int]:
    raise ReachError("no_route", "This server does not serve checksums.")


class LeaseTable:
    """All leases. Owned by the event loop's thread. Each loan is returned once, however its lease ends."""

    def __init__(
        self,
        engine: str,
        *,
        sums: Callable[[Sequence[int], int | None], list[int]] = _no_sums,
        block_tokens: int,
        most_bytes: int,
        most_leases: int = MOST_LEASES,
        lease_max_s: float = LEASE_MAX_S,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_S,
    ) -> None:
        self.engine = engine
        self._sums = sums
        self.figures = LeaseFigures()
        self.rooms: BootstrapRooms[TransferLease] = BootstrapRooms(clock, wait_s)
        self._block_tokens, self._max_bytes = block_tokens, most_bytes
        self._least_bytes = most_bytes // most_leases
        self._lease_max_s, self._clock, self._wait_s = lease_max_s, clock, wait_s
        self._is_closed = False
        self._leases: dict[str, TransferLease] = {}
        self._ended: ExpiringMap[str, _EndedLease] = ExpiringMap(clock)

    def charge(self, num_bytes: int) -> int:
        """Return the bytes charged for a lease of this size."""
        return max(num_bytes, self._least_bytes)

    def held_by(self, caller: str) -> int:
        """Return the bytes of a caller's leases."""
        return sum(lease.num_bytes for lease in self._leases.values() if lease.caller == caller)

    def lend(
        self,
        submit: Submit,
        prompt: PrefixIdentity,
        *,
        num_bytes: int,
        room: int | None = None,
        caller: str = "",
    ) -> TransferLease:
        """Prefill a prompt for a remote reader; `num_bytes` is the memory it will hold."""
        if self._is_closed:
            raise ReachError("busy", "The server is stopping; send the request to another one.")
        self.sweep()
        num_bytes = self.charge(num_bytes)
        self._check_bounds(num_bytes)
        if room is not None:
            self.rooms.check_free(room)
        loop = asyncio.get_running_loop()

        def in_loop(callback: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and everything was released before
                loop.call_soon_threadsafe(callback)

        loan = submit(lambda _: in_loop(lambda: lease.wake()))
        lease = TransferLease(new_id(), prompt, loan, num_bytes, self._block_tokens, room, caller)
        self._leases[lease.id] = lease
        self.figures.lent += 1
        self.figures.held += 1
        self.figures.held_bytes += num_bytes
        if room is not None:
            self.rooms.add(room, lease)
        loan.done.add_done_callback(lambda done: in_loop(lambda: self._read(lease, done)))
        return lease

    async def finish(self, lease: TransferLease) -> None:
        """Wait until the prompt is prefilled or its reader has left; raise if the prefill failed.

        The requesting client waits here: if it disconnects, the lease ends.
        """
        try:
            await lease.wait_until_read()
        except asyncio.CancelledError:
            self._end(lease, "prefill_failed")
            raise
        if lease.error:
            raise lease.error
        if not lease.is_read and lease.end_reason != "room_used":
            raise _lease_over()

    def cancel(self, lease: TransferLease) -> None:
        """End a lease that its client will not pass on."""
        self._end(lease, "prefill_failed")

    def restart_timeouts(self, leases: Iterable[TransferLease]) -> None:
        """Restart the silence timeout of leases now passed on to readers."""
        for lease in leases:
            lease.seen_s = self._clock()

    def expires_in(self, lease: TransferLease) -> float:
        """Return the seconds until a lease ends without a message from its reader."""
        return max(0.0, lease.seen_s + SILENCE_S - self._clock()) if lease.is_read else SILENCE_S

    async def open(self, lease_id: str, request: OpenRequest) -> OpenResponse:
        """Wait until more of a prompt is ready than the reader has seen; return its location."""
        self._check_engine(request.engine)
        return await self._open(self._find(lease_id), request)

    async def open_room(self, room: int, request: OpenRequest) -> OpenResponse:
        """Wait for a room and open its lease."""
        self._check_engine(request.engine)
        self.sweep()
        self.figures.rooms_waiting += 1
        try:
            lease = await self.rooms.find(room)
        finally:
            self.figures.rooms_waiting -= 1
        return await self._open(lease, request)

    def close(self, lease_id: str, close: CloseRequest) -> bool:
        """End a lease; return whether its reader's data are valid."""
        self._check_engine(close.engine)
        ended = self._ended.get(lease_id)
        if ended and ended.reader == close.reader and ended.reason == "room_used":
            return ended.intact
        lease = self._find(lease_id)
        if lease.reader not in (None, close.reader):
            raise ReachError(
                "held", "reader: another reader opened this lease and must close it.", field="reader"
            )
        lease.reader = close.reader
        intact = close.read and lease.is_located and lease.is_intact
        self._count_close(read=close.read, intact=intact)
        self._end(lease, "room_used", intact=intact)
        return intact

    async def sums(self, lease_id: str, request: ChecksumRequest) -> list[int]:
        """Return checksums of some blocks and the state while they are lent."""
        self._check_engine(request.engine)
        lease = self._find(lease_id)
        lent = lease.loan.lent
        if lease.reader != request.reader or not lease.is_located:
            raise ReachError("held", "reader: open the whole lease first.", field="reader")
        if max(request.indices, default=0) >= len(lent.blocks):
            raise ReachError("malformed", f"indices: it has {len(lent.blocks)} blocks.", field="indices")
        blocks = [lent.blocks[index] for index in request.indices]
        sums = await asyncio.to_thread(self._sums, blocks, lent.state)
        if not lease.is_intact:
            raise _lease_over()
        return sums

    def beat(self, beat: HeartbeatRequest) -> HeartbeatResponse:
        """Record readers as alive; return which of their leases are live."""
        self._check_engine(beat.engine)
        self.sweep()
        now = self._clock()
        leases = [lease_id for lease_id in beat.leases if lease_id in self._leases]
        for lease_id in leases:
            self._leases[lease_id].seen_s = now
        return HeartbeatResponse(leases=leases)

    def sweep(self) -> None:
        """End leases whose readers are silent, or that have reached their maximum time."""
        now = self._clock()
        for lease in list(self._leases.values()):
            if lease.is_read and (now - lease.seen_s >= SILENCE_S or now - lease.read_s >= self._lease_max_s):
                self._end(lease, "lease_over")

    async def run(self) -> None:
        """Sweep periodically."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def end_all(self) -> None:
        """Return all loans and refuse new ones, for shutdown."""
        self._is_closed = True
        for lease in list(self._leases.values()):
            self._end(lease, "lease_over")

    async def _open(self, lease: TransferLease, request: OpenRequest) -> OpenResponse:
        lease.check(request)
        self.figures.opened += lease.reader is None
        lease.reader, lease.seen_s = request.reader, self._clock()
        await lease.wait_for_more(request.num_cached, self._wait_s)
        self._check_live(lease)
        lease.seen_s = self._clock()
        return lease.open_response(request.num_cached)

    def _find(self, lease_id: str) -> TransferLease:
        self.sweep()
        lease = self._leases.get(lease_id)
        if lease is None:
            if self._ended.get(lease_id):
                raise _lease_over()
            raise ReachError("unknown_lease", "Unknown lease; prefill the prompt again.")
        return lease

    def _check_live(self, lease: TransferLease) -> None:
        """Raise if a lease has ended, or its memory has changed since the reader got its location."""
        if not (lease.end_reason or lease.is_intact):
            self._end(lease, "lease_over")
        if lease.end_reason == "prefill_failed":
            raise ReachError("prefill_failed", "The prefill failed; prefill the prompt on the other server.")
        if lease.end_reason:
            raise _lease_over()

    def _check_engine(self, engine: str) -> None:
        if engine != self.engine:
            raise ReachError(
                "other_engine",
                "engine: this is another one, perhaps the same server after a start; ask GET /reach/agents.",
                field="engine",
            )

    def _check_bounds(self, num_bytes: int) -> None:
        if self.figures.held_bytes + num_bytes > self._max_bytes:
            raise ReachError(
                "busy",
                f"{len(self._leases):,} prompts of {self.figures.held_bytes:,} bytes wait here for their "
                "readers, which leaves no memory for one more; send it again later, or to another server.",
            )

    def _read(self, lease: TransferLease, done: "Future[LentPrefix]") -> None:
        """Start the timeouts of a prefilled lease, or end a failed one."""
        if lease.end_reason:
            return
        if done.cancelled() or (error := done.exception()):
            lease.error = None if done.cancelled() else error
            self._end(lease, "prefill_failed")
            return
        lease.is_read = True
        lease.read_s = lease.seen_s = self._clock()
        lease.wake()

    def _end(self, lease: TransferLease, reason: Reason, *, intact: bool = False) -> None:
        """End a lease once, and return its loan."""
        if lease.end_reason:
            return
        lease.end_reason = reason
        del self._leases[lease.id]
        self.figures.held -= 1
        self.figures.held_bytes -= lease.num_bytes
        if reason != "room_used":
            self.figures.ended[reason] += 1
        self._ended.put(lease.id, _EndedLease(reason, lease.reader, intact))
        if lease.room is not None:
            self.rooms.end(lease.room, reason)
        lease.loan.give_back()
        lease.wake()

    def _count_close(self, *, read: bool, intact: bool) -> None:
        figures = self.figures
        if not read:
            figures.closed_unread += 1
        elif intact:
            figures.closed_intact += 1
        else:
            figures.closed_not_intact += 1


def _lease_over() -> ReachError:
    return ReachError("lease_over", "This lease is over; prefill the prompt again.")
