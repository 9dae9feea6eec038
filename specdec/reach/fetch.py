"""Fetch a prefix that another engine has prefilled: allocate memory, transfer, and validate.

The engine prefills whatever does not arrive when the request is submitted, so a fetch never changes the
output.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from specdec.config.tenant import Tenant
from specdec.engine.incoming import IncomingPrefix
from specdec.engine.transfers import Transfers
from specdec.errors import ConfigError, EngineError
from specdec.reach.allowed_peers import Endpoint
from specdec.reach.carrier import Carrier, KVRead, ReadLate, ReadLost
from specdec.reach.messages import OpenResponse
from specdec.reach.peers import LeaseHold, Peers, PeerSession
from specdec.reach.protocol import PrefixIdentity, ReachError, Reason, Reference, RoomReference
from specdec.state_slots.transfer.plan import TransferPlan

logger = logging.getLogger(__name__)

Outcome = (
    Reason
    | Literal[
        "fetched",
        "not_needed",
        "lease_lost",
        "read_lost",
        "late",
        "not_intact",
        "not_landed",
        "wrong_bytes",
        "failed",
    ]
)
"""Result of a fetch; in all cases but the first two the prompt is prefilled locally."""
ROOM_S = 30.0
"""Seconds to wait for a room: both servers get the request at the same time, and one may queue it."""
MOST_ENTERING = 192
"""Maximum rooms that requests of one caller wait for: below the connections to a peer, which all callers
share."""
MOST_DECLINING = 64
"""Maximum concurrent declines; further leases expire at the peer."""
CLEAR_S = 5e-4
"""Poll interval for the device to finish earlier operations on the memory."""
FIRST_S, AGAIN_S = 2.0, 10e-9
"""A read's deadline is `FIRST_S` plus four times its expected duration; initial seconds per byte."""
RECENT = 0.2
SAMPLED = 8
"""Blocks of a first transfer that are verified by checksum."""
Check = Literal["first", "always", "never"]
T = TypeVar("T")


class Fetched(NamedTuple):
    """Result of a fetch, and the amount transferred."""

    outcome: Outcome
    tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FetchFigures:
    """Counts of fetches since the engine was loaded."""

    under_way: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class LeaseLost(Exception):
    """The lease was lost."""


@dataclass(slots=True, eq=False)
class InFlightFetch:
    """A fetch in flight."""

    future: "Future[IncomingPrefix | None]"
    reads: list[KVRead] = field(default_factory=list)
    num_bytes: int = 0
    num_requested: int = 0
    """Number of the landing's blocks requested so far."""


class Fetcher:
    """Fetches prefixes. Owned by the event loop's thread."""

    def __init__(
        self,
        transfers: Transfers,
        carrier: Carrier,
        peers: Peers[TransferPlan],
        *,
        limit_s: float,
        check: Check = "first",
    ) -> None:
        self._transfers, self._carrier, self._peers = transfers, carrier, peers
        self._limit_s, self._check = limit_s, check
        self._byte_s = AGAIN_S
        self._under_way = 0
        """Bytes in flight, which share the bandwidth."""
        self._late: PeerSession[TransferPlan] | None = None
        """Peer whose last read was late; a single late read does not drop the peer and its other reads."""
        self.entering: Counter[str] = Counter()
        """Rooms being waited for, by caller."""
        self._declining = 0
        self._checked: dict[Endpoint, PeerSession[TransferPlan]] = {}
        self.figures = FetchFigures()

    async def fetch(self, ids: Sequence[int], tenant: Tenant, reference: Reference) -> Fetched:
        """Cache a prompt's prefix here, if fetching is faster than computing it."""
        start_s = time.perf_counter()
        self.figures.under_way += 1
        try:
            fetched = await self._fetch(ids, tenant, reference)
        finally:
            self.figures.under_way -= 1
        fetched = fetched._replace(seconds=time.perf_counter() - start_s)
        figures = self.figures
        figures.outcomes[fetched.outcome] += 1
        figures.tokens, figures.num_bytes = (
            figures.tokens + fetched.tokens,
            figures.num_bytes + fetched.num_bytes,
        )
        figures.seconds += fetched.seconds
        return fetched

    async def decline(self, ids: Sequence[int], tenant: Tenant, reference: Reference) -> None:
        """Release the other engine's memory, since the prompt is computed here."""
        if self._declining >= MOST_DECLINING:
            return
        self._declining += 1
        prompt = PrefixIdentity.of(ids[:-1], tenant.salt)
        try:
            async with asyncio.timeout(self._limit_s):
                session = await self._peers.connect(reference, prompt)
                async with self._peers.hold(session, reference, prompt) as hold:
                    if isinstance(reference, RoomReference):
                        await self._open_room(hold, tenant)
        except (ReachError, TimeoutError):
            pass
        finally:
            self._declining -= 1

    async def _fetch(self, ids: Sequence[int], tenant: Tenant, reference: Reference) -> Fetched:
        prompt = PrefixIdentity.of(ids[:-1], tenant.salt)
        session = None
        try:
            async with asyncio.timeout(self._limit_s):
                session = await self._peers.connect(reference, prompt)
                async with self._peers.hold(session, reference, prompt) as hold:
                    return await self._fetch_held(hold, ids[:-1], tenant)
        except TimeoutError:
            return Fetched("late")
        except ReachError as refusal:
            return Fetched(refusal.reason)
        except LeaseLost:
            return Fetched("lease_lost")
        except ReadLost as error:
            logger.warning("prefilling a prompt: %s", error)
            if session and not (isinstance(error, ReadLate) and self._late is not session):
                self._peers.lost(session)
            self._late = session
            return Fetched("read_lost")
        except EngineError:
            return Fetched("not_landed")  # the request will raise it next
        except Exception:
            logger.exception("a fetch failed; prefilling its prompt")
            return Fetched("failed")

    async def _fetch_held(self, hold: LeaseHold[TransferPlan], ids: Sequence[int], tenant: Tenant) -> Fetched:
        """Fetch the memory of a lease or room."""
        opened = await self._open_room(hold, tenant) if isinstance(hold.reference, RoomReference) else None
        arrival = InFlightFetch(self._transfers.begin_landing(ids, tenant))
        try:
            landing = await _unless_lost(hold, asyncio.wrap_future(arrival.future))
            if landing is None:
                return Fetched("not_needed")
            while not landing.is_clear:
                await asyncio.sleep(CLEAR_S)
            return await self._receive(hold, arrival, landing, opened)
        finally:
            self._release(arrival)

    async def _open_room(self, hold: LeaseHold[TransferPlan], tenant: Tenant) -> OpenResponse:
        """Open a room, waiting until it exists."""
        until_s = time.monotonic() + ROOM_S
        if self.entering[tenant.caller] >= MOST_ENTERING:
            raise ReachError("busy", "This caller's requests are waiting for too many rooms.")
        self.entering[tenant.caller] += 1
        try:
            while True:
                try:
                    return await self._peers.open(hold, 0)
                except ReachError as refusal:
                    if refusal.reason != "unknown_room" or time.monotonic() > until_s:
                        raise
        finally:
            self.entering -= Counter({tenant.caller: 1})  # subtraction also removes zero counts

    async def _receive(
        self,
        hold: LeaseHold[TransferPlan],
        arrival: InFlightFetch,
        landing: IncomingPrefix,
        opened: OpenResponse | None,
    ) -> Fetched:
        """Transfer blocks as they become ready, validate them, and land them."""
        if opened is None:
            opened = await _unless_lost(hold, self._peers.open(hold, landing.num_cached))
        self._begin(hold.session, arrival, landing, opened)
        while not opened.is_whole:
            opened = await _unless_lost(hold, self._peers.open(hold, opened.ready))
            self._begin(hold.session, arrival, landing, opened)
        seconds = 0.0
        for read in arrival.reads:
            seconds += await _unless_lost(hold, asyncio.wrap_future(read.done))
        self._late = None
        if self._wants_check(hold.session) and not await self._is_same(hold, landing):
            self._peers.refuse(hold.session, "checksums of the fetched blocks differ; check the network")
            return Fetched("wrong_bytes")
        hidden_1D = opened.hidden.tensor[None] if opened.hidden else None
        if hidden_1D is not None and not self._transfers.fits(hidden_1D):
            raise ReachError("garbled", f"{hold.session.at} has sent a hidden state of a wrong size or type.")
        if not await self._peers.close(hold, read=True):
            return Fetched("not_intact")
        self._byte_s += RECENT * (seconds / max(arrival.num_bytes, 1) - self._byte_s)
        if not await asyncio.wrap_future(self._transfers.land(landing, hidden_1D, seconds=seconds)):
            return Fetched("not_landed")
        return Fetched("fetched", len(landing.ids) - landing.num_cached, arrival.num_bytes)

    def _begin(
        self,
        session: PeerSession[TransferPlan],
        arrival: InFlightFetch,
        landing: IncomingPrefix,
        opened: OpenResponse,
    ) -> None:
        """Start reading the newly available blocks, and at the end the state."""
        available = opened.first + len(opened.blocks)
        first, last = len(landing.shared) + arrival.num_requested, available - len(landing.shared)
        if opened.first > first or last > len(landing.blocks):
            raise _wrong_blocks()
        remote_blocks, local_blocks = (
            opened.blocks[first - opened.first :],
            landing.blocks[arrival.num_requested : last],
        )
        state = None
        if opened.is_whole:
            if last != len(landing.blocks) or (opened.state is None) != (landing.state is None):
                raise _wrong_blocks()
            if opened.state is not None and landing.state is not None:
                state = (landing.state, opened.state)
        if not (remote_blocks or state):
            return
        try:
            indices = session.plan.pick(list(zip(local_blocks, remote_blocks, strict=True)), state)
        except ConfigError as error:
            raise ReachError("garbled", f"{session.at} has named memory outside its arena: {error}") from None
        num_bytes = session.plan.num_bytes(len(remote_blocks), int(state is not None))
        self._under_way += num_bytes
        deadline_s = FIRST_S + 4 * self._under_way * self._byte_s
        read = self._carrier.read(session.name, indices, num_bytes, deadline_s)
        loop = asyncio.get_running_loop()
        read.released.add_done_callback(lambda _: _in_loop(loop, self._arrived, num_bytes))
        arrival.reads.append(read)
        arrival.num_bytes += num_bytes
        arrival.num_requested = max(arrival.num_requested, last)

    def _arrived(self, num_bytes: int) -> None:
        self._under_way -= num_bytes

    def _wants_check(self, session: PeerSession[TransferPlan]) -> bool:
        """Return whether to verify checksums: a corrupting path does so from the start."""
        return self._check == "always" or (
            self._check == "first" and self._checked.get(session.at) is not session
        )

    async def _is_same(self, hold: LeaseHold[TransferPlan], landing: IncomingPrefix) -> bool:
        """Compare checksums of some blocks and the state with the peer's."""
        step = max(len(landing.blocks) // SAMPLED, 1)
        indices = range(0, len(landing.blocks), step)
        blocks = [landing.blocks[index] for index in indices]
        remote_sums = await self._peers.sums(hold, [len(landing.shared) + index for index in indices])
        local_sums = await asyncio.to_thread(self._transfers.sums, blocks, landing.state)
        self._checked[hold.session.at] = hold.session
        return local_sums == remote_sums

    def _release(self, arrival: InFlightFetch) -> None:
        """Release memory that was not landed, once nothing can write to it."""
        for read in arrival.reads:
            self._carrier.give_up(read)
        if not arrival.future.cancel():
            self._drop_after(arrival.future, [read.released for read in arrival.reads])

    def _drop_after(self, future: "Future[IncomingPrefix | None]", pending: "list[Future[None]]") -> None:
        """Drop the landing after all pending reads; callable from any thread."""
        while pending:
            released = pending.pop()
            if not released.done():
                released.add_done_callback(lambda _: self._drop_after(future, pending))
                return
        future.add_done_callback(self._drop)

    def _drop(self, future: "Future[IncomingPrefix | None]") -> None:
        with suppress(Exception):  # a closed engine has no memory to release
            if landing := future.result():
                self._transfers.drop(landing)


async def _unless_lost(hold: LeaseHold[TransferPlan], awaitable: Awaitable[T]) -> T:
    """Await a result, or raise Lost if the lease is lost first."""
    task, lost = asyncio.ensure_future(awaitable), asyncio.ensure_future(hold.lost.wait())
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise LeaseLost
    finally:
        lost.cancel()
        task.cancel()


def _in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[int], None], value: int) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(callback, value)


def _wrong_blocks() -> ReachError:
    return ReachError("garbled", "A peer's blocks do not match the prompt.")
