"""Two engines of one process that fetch from each other over real HTTP, with copies as the wire."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specdec import SamplingParams, SpecEngine
from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.carrier import Carrier
from specdec.reach.channel import Channel, channel_app
from specdec.reach.fetch import Fetcher
from specdec.reach.handshake import ArenaHandshake
from specdec.reach.lease_table import LeaseTable
from specdec.reach.peers import Peers
from specdec.reach.protocol import LeaseReference, PrefixIdentity, RoomReference, Secret, new_id
from specdec.state_slots.arena import Arena
from specdec.state_slots.transfer.plan import TransferPlan
from tests.reach.copies import Copies

SECRET = Secret("a-secret-of-the-tests")
FACTS = {"model": "small"}
HOST = "127.0.0.1"


@dataclass
class Side:
    """One engine, with its leases and its fetcher."""

    engine: SpecEngine
    carrier: Any
    book: LeaseTable
    channel: Channel
    peers: Peers[TransferPlan]
    fetcher: Fetcher

    async def lend(
        self, prompt: Sequence[int], *, room: int | None = None, salt: str = ""
    ) -> LeaseReference | RoomReference:
        """Prefill a prompt for the other side; with a room, return without waiting for it."""
        prepared = self.engine.prepare(list(prompt), SamplingParams(max_tokens=1, cache_salt=salt or None))
        own = PrefixIdentity.of(prompt[:-1], salt)
        num_bytes = self.engine.transfers.arena.layout.sequence_bytes(own.length)
        lease = self.book.lend(
            partial(self.engine.transfers.lend, prepared), own, num_bytes=num_bytes, room=room
        )
        if room is not None:
            return RoomReference(HOST, self.channel.port, room)
        await self.book.finish(lease)
        mac = SECRET.sign(self.book.engine, lease.id, own)
        return LeaseReference(HOST, self.channel.port, self.book.engine, lease.id, mac)

    def take_back(self) -> None:
        """End every lease, even while it is read."""
        for lease in list(self.book._leases.values()):
            self.book.cancel(lease)

    async def say(self, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        done = await asyncio.to_thread(self.engine.generate, [list(prompt)], params)
        return done[0].token_ids

    async def settle(self) -> None:
        """Wait until idle, then check that memory is consistent and can all be freed."""
        for _ in range(1500):
            connector = self.engine.model.loop.scheduler.connector
            if not (self.book.figures.held or self.carrier.figures.quarantined or connector.is_receiving):
                break
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.engine.generate, [[1]], SamplingParams(max_tokens=1))
        await asyncio.to_thread(self.engine.flush)
        arena = self.engine.transfers.arena
        arena.check_integrity()
        assert arena.usage().free_slabs == arena.usage().slabs, "all has gone back"
        assert self.engine.stats().failed_steps == 0


@asynccontextmanager
async def side(
    folder: Path,
    *,
    peer: Side | None = None,
    carry: Callable[[Arena], Carrier] = Copies,
    facts: dict[str, str] | None = None,
    limit_s: float = 20.0,
    check: Any = "first",
    **fields: Any,
) -> AsyncIterator[Side]:
    engine = await asyncio.to_thread(partial(SpecEngine, folder, **fields))
    carrier, name, layout = carry(engine.transfers.arena), new_id(), engine.transfers.arena.layout
    transfers = engine.transfers
    book = LeaseTable(name, block_tokens=layout.block_tokens, most_bytes=1 << 40, sums=transfers.sums)
    meeting = ArenaHandshake(name, facts or FACTS, transfers.arena, carrier)
    channel = await Channel(book, channel_app(book, SECRET, agents=meeting.agents)).start(HOST, 0)
    peers = Peers(
        SECRET,
        AllowedPeers([HOST], peer.channel.port if peer else channel.port),
        fingerprint=meeting.fingerprint,
        facts=meeting.facts,
        attach=meeting.attach,
        detach=carrier.detach,
    )
    fetcher = Fetcher(transfers, carrier, peers, limit_s=limit_s, check=check)
    try:
        yield Side(engine, carrier, book, channel, peers, fetcher)
    finally:
        await peers.stop()
        await channel.stop()
        await asyncio.to_thread(carrier.close)
        await asyncio.to_thread(engine.close)
