"""The engines that this one fetches from: which are allowed, who they are now, and what is wanted of them."""

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
from specdec.reach.allowed import Allowed, Endpoint
from specdec.reach.calls import CALL_S, WAITING_S, Calls, Kind
from specdec.reach.messages import (
    MOST_BEATS,
    Agents,
    Ask,
    AskSums,
    Beat,
    Close,
    Closed,
    Live,
    Opened,
    Sums,
)
from specdec.reach.recent import REMEMBERED_S
from specdec.reach.terms import (
    BEAT_S,
    VARIABLE,
    LeaseReference,
    Prompt,
    Reason,
    Reference,
    Refusal,
    RoomReference,
    Secret,
    differences,
    new_id,
)

logger = logging.getLogger(__name__)

MEET_S = 10.0
MEET_AGAIN_S = 1.0
"""Between two handshakes with a peer that is up: requests that name another engine do not cause more."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""For which a peer that is down is left alone: each time twice as long."""
ASK_AGAIN_S = 1.0
"""Minimum time between two requests for a prompt if the first answer has nothing new."""
MOST_LINKS = 1024
MOST_SILENT = 2
"""Beats in turn without an answer, after which a peer counts as lost."""
SAID_S = 60.0
"""Between two lines of the log that say for one reason why a request's reference was not followed."""
DOWN: frozenset[Reason] = frozenset({"peer_down", "peer_slow", "garbled"})

P = TypeVar("P")


@dataclass(slots=True)
class PeersFigures:
    """Count what was asked of peers; the first three say what is there now."""

    up: int = 0
    """Peers whose arenas can be read."""
    refused_peers: int = 0
    """Peers that are up, but whose model, layout or version is another one."""
    held: int = 0
    """Leases and rooms that requests here hold or wait for."""
    handshakes: int = 0
    beats: int = 0
    failures: Counter[Reason] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, eq=False)
class Pair(Generic[P]):
    """A peer as it was met: it is another pair after either of the two has begun anew."""

    at: Endpoint
    engine: str
    plan: P
    """What `attach` returned."""

    @property
    def name(self) -> str:
        """By which its arena is attached: of this life, and at this address, as one engine may have two."""
        return _name(self.engine, self.at)


@dataclass(slots=True, eq=False)
class Hold(Generic[P]):
    """A lease or a room that a request here wants: beats are sent for it."""

    pair: Pair[P]
    reference: Reference
    prompt: Prompt
    reader: str = field(default_factory=new_id)
    lease: str | None = None
    """Known from the first answer on, where it was a room."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is nothing to fetch any more."""
    is_closed: bool = False

    @property
    def path(self) -> str:
        return f"/reach/leases/{self.lease}"


@dataclass(slots=True, eq=False)
class _Link(Generic[P]):
    """What is known of an endpoint."""

    at: Endpoint
    pair: Pair[P] | None = None
    met_s: float = 0.0
    refusal: Refusal | None = None
    """Why nothing is asked there until `until_s`."""
    until_s: float = 0.0
    pause_s: float = 0.0
    holds: set[Hold[P]] = field(default_factory=set)
    beating: "asyncio.Task[None] | None" = None
    meeting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Peers(Generic[P]):
    """Owned by the event loop's thread.

    `attach` makes a peer's arenas readable by a name and returns what reads are planned with; `detach` undoes
    it. Both run in a thread beside the event loop's.
    """

    def __init__(
        self,
        secret: Secret,
        allowed: Allowed,
        *,
        fingerprint: str,
        facts: dict[str, str],
        attach: Callable[[str, Agents], P],
        detach: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
    ) -> None:
        self.figures = PeersFigures()
        self._secret, self._allowed = secret, allowed
        self._fingerprint, self._facts = fingerprint, facts
        self._attach, self._detach = attach, detach
        self._clock, self._beat_s = clock, beat_s
        self._calls = Calls(secret)
        self._said_s: dict[Reason, float] = {}
        self._links: dict[Endpoint, _Link[P]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "specdec-peers")
        """Attaches and detaches in order: one of the two may be of a peer that has come back."""

    async def meet(self, reference: Reference, prompt: Prompt) -> Pair[P]:
        """Return the pair of a reference. A `Refusal` says why not."""
        try:
            at = self._named(reference, prompt)
            engine = reference.engine if isinstance(reference, LeaseReference) else None
            return await self._meet(self._link(at), engine)
        except Refusal as refusal:
            self.figures.failures[refusal.reason] += 1
            raise

    def _named(self, reference: Reference, prompt: Prompt) -> Endpoint:
        """Return where a reference leads, if that is allowed and it was signed for this prompt.

        A request that names another address or has another signature may be forged, but with a wrong secret
        or wrong `reach_peers` all are refused so: the log says why, once a minute.
        """
        try:
            at = self._allowed.endpoint(reference.host, reference.port)
            if isinstance(reference, LeaseReference) and not self._secret.verifies(reference, prompt):
                raise Refusal(
                    "bad_mac",
                    f"kv_transfer_params: it is not signed for this prompt by {at}; send the same request to "
                    f"both servers, and give them one {VARIABLE}, model and template.",
                    field="kv_transfer_params",
                )
        except Refusal as refusal:
            now_s = self._clock()
            if now_s >= self._said_s.get(refusal.reason, -math.inf) + SAID_S:
                self._said_s[refusal.reason] = now_s
                logger.warning("a prompt is read here and not fetched: %s", refusal)
            raise
        return at

    @contextlib.asynccontextmanager
    async def hold(self, pair: Pair[P], reference: Reference, prompt: Prompt) -> AsyncIterator[Hold[P]]:
        """Keep a lease alive; what was not closed when this is left is closed as not wanted."""
        lease = reference.lease if isinstance(reference, LeaseReference) else None
        hold = Hold(pair, reference, prompt, lease=lease)
        link = self._link(pair.at)
        link.holds.add(hold)
        self.figures.held += 1
        if link.beating is None:
            link.beating = asyncio.create_task(self._beat(link), name=f"beats to {pair.at}")
        try:
            yield hold
        finally:
            link.holds.discard(hold)
            self.figures.held -= 1
            if not (hold.is_closed or hold.lease is None or hold.lost.is_set()):
                task = asyncio.create_task(self._close_unread(hold))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def open(self, hold: Hold[P], have: int) -> Opened:
        """Ask where a prompt's memory lies, of which `have` leading tokens' blocks are known.

        It waits for P's engine some seconds at most: what is answered may be no more than was known. A room
        that is not there yet is `unknown_room`: ask again.
        """
        prompt, reference = hold.prompt, hold.reference
        room = reference.room if isinstance(reference, RoomReference) and hold.lease is None else None
        ask = Ask(
            engine=hold.pair.engine, hash=prompt.hash, length=prompt.length, have=have, reader=hold.reader
        )
        path = f"{hold.path}/open" if room is None else f"/reach/rooms/{room}"
        kind: Kind = "lease" if room is None else "room"
        again_s = asyncio.get_running_loop().time() + ASK_AGAIN_S
        try:
            opened = await self._calls.post(hold.pair.at, path, ask, Opened, WAITING_S, kind)
            if (opened.length, hold.lease or opened.lease) != (prompt.length, opened.lease):
                raise Refusal("garbled", f"{hold.pair.at} has answered for another prompt.")
        except Refusal as refusal:
            self._heed(hold.pair, refusal)
            if refusal.reason == "unknown_room":
                await _sleep_until(again_s)
            raise
        hold.lease = opened.lease
        if opened.ready <= have and not opened.is_whole:
            await _sleep_until(again_s)
        return opened

    async def sums(self, hold: Hold[P], places: Sequence[int]) -> list[int]:
        """Ask what the bytes of some blocks come to, and of the state."""
        body = AskSums(engine=hold.pair.engine, reader=hold.reader, places=list(places))
        try:
            return (await self._calls.post(hold.pair.at, f"{hold.path}/sums", body, Sums, WAITING_S)).sums
        except Refusal as refusal:
            self._heed(hold.pair, refusal)
            raise

    async def close(self, hold: Hold[P], *, read: bool) -> bool:
        """Release P's memory; return whether what was read may be used."""
        if hold.lease is None:
            return False
        body = Close(engine=hold.pair.engine, reader=hold.reader, read=read)
        try:
            closed = await self._calls.post(hold.pair.at, f"{hold.path}/close", body, Closed, CALL_S)
        except Refusal as refusal:
            self._heed(hold.pair, refusal)
            hold.is_closed = True
            return False
        hold.is_closed = True
        return closed.intact

    def lost(self, pair: Pair[P]) -> None:
        """Note that a pair's memory can no longer be read: the next request meets the peer anew."""
        link = self._links.get(pair.at)
        if link and link.pair is pair:
            self._forget(link)

    def refuse(self, pair: Pair[P], why: str) -> None:
        """Read nothing from a peer for a while, such as one whose bytes came wrong."""
        link = self._links.get(pair.at)
        if link and link.pair is pair:
            self._forget(link)
            self._refuse(link, Refusal("carrier", why), REMEMBERED_S)

    async def stop(self) -> None:
        """Send nothing any more; what was held ends at the peers by its silence."""
        tasks = [*self._closing, *(link.beating for link in self._links.values() if link.beating)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._calls.close()
        self._thread.shutdown(wait=False)

    def _link(self, at: Endpoint) -> _Link[P]:
        link = self._links.get(at)
        if link is None:
            if len(self._links) >= MOST_LINKS:
                self._drop_a_link()
            link = self._links[at] = _Link(at)
        return link

    def _drop_a_link(self) -> None:
        """Forget the oldest endpoint that nothing is known of but that it failed."""
        for at, link in self._links.items():
            if link.pair is None and not link.holds and not link.meeting.locked():
                self._tally()
                del self._links[at]
                return
        raise Refusal("peer_down", f"There are {MOST_LINKS:,} peers already; give fewer as reach_peers.")

    async def _meet(self, link: _Link[P], engine: str | None) -> Pair[P]:
        """Return the pair of a link, and shake hands first where there is none of this life."""
        async with link.meeting:
            now = self._clock()
            if link.refusal and now < link.until_s:
                raise Refusal(link.refusal.reason, str(link.refusal), field=link.refusal.field)
            if link.pair and (engine in (None, link.pair.engine)):
                return link.pair
            if link.pair and now - link.met_s < MEET_AGAIN_S:
                raise _past(link.at)
            pair = await self._shake_hands(link)
            if engine not in (None, pair.engine):
                raise _past(link.at)
            return pair

    async def _shake_hands(self, link: _Link[P]) -> Pair[P]:
        self.figures.handshakes += 1
        try:
            agents = await self._calls.get(link.at, "/reach/agents", Agents, MEET_S)
            if link.pair and link.pair.engine == agents.engine:
                link.met_s = self._clock()
                return link.pair
            self._forget(link)
            self._compare(link.at, agents)
            plan = await self._attached(_name(agents.engine, link.at), agents)
        except Refusal as refusal:
            self._forget(link)
            is_down = refusal.reason in DOWN
            link.pause_s = min(max(2 * link.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S) if is_down else 0.0
            self._refuse(link, refusal, link.pause_s or REMEMBERED_S)
            raise
        except SpecdecError as error:
            reason: Reason = "layout" if error.field else "carrier"
            unfit = Refusal(reason, f"{link.at}: {error}", field=error.field)
            self._refuse(link, unfit, REMEMBERED_S)
            raise unfit from None
        link.pair, link.met_s = Pair(link.at, agents.engine, plan), self._clock()
        link.refusal, link.pause_s = None, 0.0
        self._tally()
        logger.info("prompts can be fetched from %s", link.at)
        return link.pair

    async def _attached(self, name: str, agents: Agents) -> P:
        """Make a peer's arenas readable, in bounded time."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(MEET_S):
                return await loop.run_in_executor(self._thread, self._attach, name, agents)
        except TimeoutError:
            self._thread.submit(self._detach, name)
            raise Refusal("carrier", f"Its memory could not be reached within {MEET_S:g} s.") from None

    def _compare(self, at: Endpoint, agents: Agents) -> None:
        if agents.fingerprint != self._fingerprint:
            differ = differences(agents.facts, self._facts) or "the version of the protocol"
            raise Refusal(
                "fingerprint",
                f"{at} cannot be read from: {differ}. Start both with one model, settings and version.",
            )

    def _refuse(self, link: _Link[P], refusal: Refusal, pause_s: float) -> None:
        """Ask nothing there for a while; say it in the log once for each reason in turn."""
        if link.refusal is None or link.refusal.reason != refusal.reason:
            logger.warning("no prompts are fetched from %s: %s", link.at, refusal)
        # A copy, as the traceback of the one that was raised refers to what the peer answered.
        link.refusal = Refusal(refusal.reason, str(refusal), field=refusal.field)
        link.until_s = self._clock() + pause_s
        self._tally()

    def _forget(self, link: _Link[P]) -> None:
        """Undo a pair: nothing of a past life is used, and what was held there is lost."""
        pair, link.pair = link.pair, None
        if pair is None:
            return
        for hold in link.holds:
            if hold.pair is pair:
                hold.lost.set()
        self._thread.submit(self._detach, pair.name)
        self._tally()

    def _heed(self, pair: Pair[P], refusal: Refusal) -> None:
        """Learn from a call that failed what is to be known of its peer."""
        self.figures.failures[refusal.reason] += 1
        link = self._links.get(pair.at)
        if link and link.pair is pair and refusal.reason in ("other_engine", "peer_down"):
            self._forget(link)

    def _tally(self) -> None:
        self.figures.up = sum(link.pair is not None for link in self._links.values())
        self.figures.refused_peers = sum(
            link.refusal is not None and link.refusal.reason not in DOWN for link in self._links.values()
        )

    async def _beat(self, link: _Link[P]) -> None:
        """Send beats for all that is held at a peer, for as long as anything is."""
        silent = 0
        try:
            while link.holds:
                await asyncio.sleep(self._beat_s)
                try:
                    await self._beat_once(link)
                    silent = 0
                except Refusal as refusal:
                    silent += 1
                    self.figures.failures[refusal.reason] += 1
                    if refusal.reason != "peer_slow" or silent >= MOST_SILENT:
                        self._lose(link)
        finally:
            link.beating = None

    async def _beat_once(self, link: _Link[P]) -> None:
        pair = link.pair
        holds = [hold for hold in link.holds if hold.pair is pair and not hold.lost.is_set()]
        for start in range(0, len(holds), MOST_BEATS):
            part = holds[start : start + MOST_BEATS]
            leases = [hold.lease for hold in part if hold.lease]
            beat = Beat(engine=part[0].pair.engine, leases=leases)
            live = set((await self._calls.post(link.at, "/reach/beat", beat, Live, kind="beat")).leases)
            self.figures.beats += 1
            for hold in part:
                if hold.lease in leases and hold.lease not in live:
                    hold.lost.set()

    def _lose(self, link: _Link[P]) -> None:
        """Give up what is held at a peer that no longer answers."""
        for hold in link.holds:
            hold.lost.set()
        self._forget(link)

    async def _close_unread(self, hold: Hold[P]) -> None:
        await self.close(hold, read=False)


async def _sleep_until(time_s: float) -> None:
    await asyncio.sleep(max(time_s - asyncio.get_running_loop().time(), 0.0))


def _name(engine: str, at: Endpoint) -> str:
    return f"{engine} at {at}"


def _past(at: Endpoint) -> Refusal:
    return Refusal(
        "other_engine", f"{at} has begun anew since it read this prompt; have the prompt read again."
    )
