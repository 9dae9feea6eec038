"""Peers to fetch from: handshakes, sessions, and the leases and rooms held there."""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specdec.errors import SpecdecError
from specdec.reach.allowed_peers import AllowedPeers, Endpoint
from specdec.reach.expiring_map import REMEMBERED_S
from specdec.reach.messages import (
    MOST_BEATS,
    AgentsResponse,
    ChecksumRequest,
    ChecksumResponse,
    CloseRequest,
    CloseResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    OpenRequest,
    OpenResponse,
)
from specdec.reach.peer_client import CALL_S, WAITING_S, Kind, PeerClient
from specdec.reach.protocol import (
    BEAT_S,
    VARIABLE,
    LeaseReference,
    PrefixIdentity,
    ReachError,
    Reason,
    Reference,
    RoomReference,
    Secret,
    differences,
    new_id,
)

logger = logging.getLogger(__name__)

MEET_S = 10.0
MEET_AGAIN_S = 1.0
"""Minimum seconds between handshakes with a live peer, whatever engine requests name."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Back-off for a peer that is down; doubles each time."""
ASK_AGAIN_S = 1.0
"""Minimum time between two requests for a prompt if the first answer has nothing new."""
MOST_LINKS = 1024
MOST_SILENT = 2
"""Consecutive unanswered beats after which a peer counts as lost."""
SAID_S = 60.0
"""Seconds between log lines that give the same reason for not following a reference."""
DOWN: frozenset[Reason] = frozenset({"peer_down", "peer_slow", "garbled"})

P = TypeVar("P")


@dataclass(slots=True)
class PeersFigures:
    """Counts of requests to peers; the first three are current values."""

    up: int = 0
    """Peers whose arenas are attached."""
    refused_peers: int = 0
    """Live peers with another model, layout or version."""
    held: int = 0
    """Leases and rooms that local requests hold or wait for."""
    handshakes: int = 0
    beats: int = 0
    failures: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class PeerSession(Generic[P]):
    """A session with one peer process; a restart of either side creates a new one."""

    at: Endpoint
    engine: str
    plan: P
    """Result of `attach`."""

    @property
    def name(self) -> str:
        """Name under which its arena is attached: by engine and address, since one engine may have two."""
        return _name(self.engine, self.at)


@dataclass(slots=True, eq=False)
class LeaseHold(Generic[P]):
    """A lease or room that a local request fetches, kept alive by heartbeats."""

    session: PeerSession[P]
    reference: Reference
    prompt: PrefixIdentity
    reader: str = field(default_factory=new_id)
    lease: str | None = None
    """Known after the first answer, for a room."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the lease is lost."""
    is_closed: bool = False

    @property
    def path(self) -> str:
        return f"/reach/leases/{self.lease}"


@dataclass(slots=True, eq=False)
class _Link(Generic[P]):
    """State of an endpoint."""

    at: Endpoint
    session: PeerSession[P] | None = None
    met_s: float = 0.0
    refusal: ReachError | None = None
    """Reason why nothing is requested there until `until_s`."""
    until_s: float = 0.0
    pause_s: float = 0.0
    holds: set[LeaseHold[P]] = field(default_factory=set)
    beating: "asyncio.Task[None] | None" = None
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Peers(Generic[P]):
    """All peers. Owned by the event loop's thread.

    `attach` attaches a peer's arena under a name and returns the plan for reading it; `detach` undoes it.
    Both run in another thread.
    """

    def __init__(
        self,
        secret: Secret,
        allowed: AllowedPeers,
        *,
        fingerprint: str,
        facts: dict[str, str],
        attach: Callable[[str, AgentsResponse], P],
        detach: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
    ) -> None:
        self.figures = PeersFigures()
        self._secret, self._allowed = secret, allowed
        self._fingerprint, self._facts = fingerprint, facts
        self._attach, self._detach = attach, detach
        self._clock, self._beat_s = clock, beat_s
        self._calls = PeerClient(secret)
        self._logged_s: dict[Reason, float] = {}
        self._links: dict[Endpoint, _Link[P]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "specdec-peers")
        """Attaches and detaches in order: one of the two may concern a peer that has restarted."""

    async def connect(self, reference: Reference, prompt: PrefixIdentity) -> PeerSession[P]:
        """Return the session of a reference's peer. Raises a `ReachError` with the reason."""
        try:
            endpoint = self._verified_endpoint(reference, prompt)
            engine = reference.engine if isinstance(reference, LeaseReference) else None
            return await self._connect(self._link(endpoint), engine)
        except ReachError as refusal:
            self.figures.failures[refusal.reason] += 1
            raise

    def _verified_endpoint(self, reference: Reference, prompt: PrefixIdentity) -> Endpoint:
        """Return a reference's endpoint, if it is allowed and the signature matches this prompt.

        A wrong address or signature may be a forgery, but with a wrong secret or wrong `reach_peers` all
        requests fail this way: so the log gives the reason, once a minute.
        """
        try:
            endpoint = self._allowed.endpoint(reference.host, reference.port)
            if isinstance(reference, LeaseReference) and not self._secret.verifies(reference, prompt):
                raise ReachError(
                    "bad_mac",
                    f"kv_transfer_params: it is not signed for this prompt by {endpoint}; send the same "
                    f"request to both servers, and give them one {VARIABLE}, model and template.",
                    field="kv_transfer_params",
                )
        except ReachError as refusal:
            now_s = self._clock()
            if now_s >= self._logged_s.get(refusal.reason, -math.inf) + SAID_S:
                self._logged_s[refusal.reason] = now_s
                logger.warning("prefilling a prompt instead of fetching it: %s", refusal)
            raise
        return endpoint

    @contextlib.asynccontextmanager
    async def hold(
        self, session: PeerSession[P], reference: Reference, prompt: PrefixIdentity
    ) -> AsyncIterator[LeaseHold[P]]:
        """Keep a lease alive within the context; if not closed by its end, close it as unread."""
        lease = reference.lease if isinstance(reference, LeaseReference) else None
        hold = LeaseHold(session, reference, prompt, lease=lease)
        link = self._link(session.at)
        link.holds.add(hold)
        self.figures.held += 1
        if link.beating is None:
            link.beating = asyncio.create_task(self._beat(link), name=f"beats to {session.at}")
        try:
            yield hold
        finally:
            link.holds.discard(hold)
            self.figures.held -= 1
            if not (hold.is_closed or hold.lease is None or hold.lost.is_set()):
                task = asyncio.create_task(self._close_unread(hold))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def open(self, hold: LeaseHold[P], num_cached: int) -> OpenResponse:
        """Query the location of a prompt's memory; the blocks of `num_cached` leading tokens are known.

        Waits some seconds at most for the peer's engine, so the answer may contain nothing new. A room that
        does not exist yet raises `unknown_room`: try again.
        """
        prompt, reference = hold.prompt, hold.reference
        room = reference.room if isinstance(reference, RoomReference) and hold.lease is None else None
        request = OpenRequest(
            engine=hold.session.engine,
            hash=prompt.hash,
            length=prompt.length,
            num_cached=num_cached,
            reader=hold.reader,
        )
        path = f"{hold.path}/open" if room is None else f"/reach/rooms/{room}"
        kind: Kind = "lease" if room is None else "room"
        again_s = asyncio.get_running_loop().time() + ASK_AGAIN_S
        try:
            opened = await self._calls.post(hold.session.at, path, request, OpenResponse, WAITING_S, kind)
            if (opened.length, hold.lease or opened.lease) != (prompt.length, opened.lease):
                raise ReachError("garbled", f"{hold.session.at} has answered for another prompt.")
        except ReachError as refusal:
            self._note_failure(hold.session, refusal)
            if refusal.reason == "unknown_room":
                await _sleep_until(again_s)
            raise
        hold.lease = opened.lease
        if opened.ready <= num_cached and not opened.is_whole:
            await _sleep_until(again_s)
        return opened

    async def sums(self, hold: LeaseHold[P], indices: Sequence[int]) -> list[int]:
        """Return the peer's checksums of some blocks and of the state."""
        body = ChecksumRequest(engine=hold.session.engine, reader=hold.reader, indices=list(indices))
        try:
            return (
                await self._calls.post(
                    hold.session.at, f"{hold.path}/sums", body, ChecksumResponse, WAITING_S
                )
            ).sums
        except ReachError as refusal:
            self._note_failure(hold.session, refusal)
            raise

    async def close(self, hold: LeaseHold[P], *, read: bool) -> bool:
        """Release the peer's memory; return whether the data read are valid."""
        if hold.lease is None:
            return False
        body = CloseRequest(engine=hold.session.engine, reader=hold.reader, read=read)
        try:
            closed = await self._calls.post(
                hold.session.at, f"{hold.path}/close", body, CloseResponse, CALL_S
            )
        except ReachError as refusal:
            self._note_failure(hold.session, refusal)
            hold.is_closed = True
            return False
        hold.is_closed = True
        return closed.intact

    def lost(self, session: PeerSession[P]) -> None:
        """Drop a session whose memory can no longer be read; the next request shakes hands again."""
        link = self._links.get(session.at)
        if link and link.session is session:
            self._forget(link)

    def refuse(self, session: PeerSession[P], reason: str) -> None:
        """Refuse a peer for a while, for example after wrong bytes."""
        link = self._links.get(session.at)
        if link and link.session is session:
            self._forget(link)
            self._refuse(link, ReachError("carrier", reason), REMEMBERED_S)

    async def stop(self) -> None:
        """Stop all requests; their leases expire at the peers."""
        tasks = [*self._closing, *(link.beating for link in self._links.values() if link.beating)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.close()
        self._thread.shutdown(wait=False)

    def _link(self, endpoint: Endpoint) -> _Link[P]:
        link = self._links.get(endpoint)
        if link is None:
            if len(self._links) >= MOST_LINKS:
                self._drop_a_link()
            link = self._links[endpoint] = _Link(endpoint)
        return link

    def _drop_a_link(self) -> None:
        """Drop the oldest endpoint without a session or holds."""
        for endpoint, link in self._links.items():
            if link.session is None and not link.holds and not link.meeting.locked():
                self._tally()
                del self._links[endpoint]
                return
        raise ReachError("peer_down", f"There are {MOST_LINKS:,} peers already; give fewer as reach_peers.")

    async def _connect(self, link: _Link[P], engine: str | None) -> PeerSession[P]:
        """Return an endpoint's session, with a handshake if there is none for this engine."""
        async with link.meeting:
            now = self._clock()
            if link.refusal and now < link.until_s:
                raise ReachError(link.refusal.reason, str(link.refusal), field=link.refusal.field)
            if link.session and (engine in (None, link.session.engine)):
                return link.session
            if link.session and now - link.met_s < MEET_AGAIN_S:
                raise _restarted(link.at)
            session = await self._handshake(link)
            if engine not in (None, session.engine):
                raise _restarted(link.at)
            return session

    async def _handshake(self, link: _Link[P]) -> PeerSession[P]:
        self.figures.handshakes += 1
        try:
            agents = await self._calls.get(link.at, "/reach/agents", AgentsResponse, MEET_S)
            if link.session and link.session.engine == agents.engine:
                link.met_s = self._clock()
                return link.session
            self._forget(link)
            self._compare(link.at, agents)
            plan = await self._attached(_name(agents.engine, link.at), agents)
        except ReachError as refusal:
            self._forget(link)
            is_down = refusal.reason in DOWN
            link.pause_s = min(max(2 * link.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S) if is_down else 0.0
            self._refuse(link, refusal, link.pause_s or REMEMBERED_S)
            raise
        except SpecdecError as error:
            reason: Reason = "layout" if error.field else "carrier"
            mismatch = ReachError(reason, f"{link.at}: {error}", field=error.field)
            self._refuse(link, mismatch, REMEMBERED_S)
            raise mismatch from None
        link.session, link.met_s = PeerSession(link.at, agents.engine, plan), self._clock()
        link.refusal, link.pause_s = None, 0.0
        self._tally()
        logger.info("prompts can be fetched from %s", link.at)
        return link.session

    async def _attached(self, name: str, agents: AgentsResponse) -> P:
        """Attach a peer's arena, with a timeout."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(MEET_S):
                return await loop.run_in_executor(self._thread, self._attach, name, agents)
        except TimeoutError:
            self._thread.submit(self._detach, name)
            raise ReachError("carrier", f"Its memory could not be reached within {MEET_S:g} s.") from None

    def _compare(self, endpoint: Endpoint, agents: AgentsResponse) -> None:
        if agents.fingerprint != self._fingerprint:
            differ = differences(agents.facts, self._facts) or "the version of the protocol"
            raise ReachError(
                "fingerprint",
                f"{endpoint} cannot be read from: {differ}. Start both with one model, settings and version.",
            )

    def _refuse(self, link: _Link[P], refusal: ReachError, pause_s: float) -> None:
        """Back off from a peer, logging changes of the reason."""
        if link.refusal is None or link.refusal.reason != refusal.reason:
            logger.warning("no prompts are fetched from %s: %s", link.at, refusal)
        # A copy, since the raised one's traceback refers to the peer's answer.
        link.refusal = ReachError(refusal.reason, str(refusal), field=refusal.field)
        link.until_s = self._clock() + pause_s
        self._tally()

    def _forget(self, link: _Link[P]) -> None:
        """Drop a session: detach the peer and mark its holds as lost."""
        session, link.session = link.session, None
        if session is None:
            return
        for hold in link.holds:
            if hold.session is session:
                hold.lost.set()
        self._thread.submit(self._detach, session.name)
        self._tally()

    def _note_failure(self, session: PeerSession[P], refusal: ReachError) -> None:
        """Update the peer's state after a failed call."""
        self.figures.failures[refusal.reason] += 1
        link = self._links.get(session.at)
        if link and link.session is session and refusal.reason in ("other_engine", "peer_down"):
            self._forget(link)

    def _tally(self) -> None:
        self.figures.up = sum(link.session is not None for link in self._links.values())
        self.figures.refused_peers = sum(
            link.refusal is not None and link.refusal.reason not in DOWN for link in self._links.values()
        )

    async def _beat(self, link: _Link[P]) -> None:
        """Send heartbeats while anything is leased at a peer."""
        missed = 0
        try:
            while link.holds:
                await asyncio.sleep(self._beat_s)
                try:
                    await self._beat_once(link)
                    missed = 0
                except ReachError as refusal:
                    missed += 1
                    self.figures.failures[refusal.reason] += 1
                    if refusal.reason != "peer_slow" or missed >= MOST_SILENT:
                        self._mark_lost(link)
        finally:
            link.beating = None

    async def _beat_once(self, link: _Link[P]) -> None:
        session = link.session
        holds = [hold for hold in link.holds if hold.session is session and not hold.lost.is_set()]
        for start in range(0, len(holds), MOST_BEATS):
            batch = holds[start : start + MOST_BEATS]
            leases = [hold.lease for hold in batch if hold.lease]
            beat = HeartbeatRequest(engine=batch[0].session.engine, leases=leases)
            live = set(
                (await self._calls.post(link.at, "/reach/beat", beat, HeartbeatResponse, kind="beat")).leases
            )
            self.figures.beats += 1
            for hold in batch:
                if hold.lease in leases and hold.lease not in live:
                    hold.lost.set()

    def _mark_lost(self, link: _Link[P]) -> None:
        """Mark everything held at an unresponsive peer as lost."""
        for hold in link.holds:
            hold.lost.set()
        self._forget(link)

    async def _close_unread(self, hold: LeaseHold[P]) -> None:
        await self.close(hold, read=False)


async def _sleep_until(time_s: float) -> None:
    await asyncio.sleep(max(time_s - asyncio.get_running_loop().time(), 0.0))


def _name(engine: str, endpoint: Endpoint) -> str:
    return f"{engine} at {endpoint}"


def _restarted(endpoint: Endpoint) -> ReachError:
    return ReachError(
        "other_engine", f"{endpoint} has restarted since it prefilled this prompt; prefill the prompt again."
    )
