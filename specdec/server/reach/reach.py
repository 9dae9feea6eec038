"""A server's lending and fetching; `ServerState` has one of these, or None."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from specdec.core.params import PreparedPrompt
from specdec.engine.engine import SpecEngine
from specdec.reach.carrier import Carrier
from specdec.reach.channel import Channel, channel_app
from specdec.reach.fetch import Fetcher, FetchFigures
from specdec.reach.fingerprint import facts_of
from specdec.reach.handshake import ArenaHandshake
from specdec.reach.lease_table import LeaseTable
from specdec.reach.nixl import Nixl
from specdec.reach.peers import Peers
from specdec.reach.prefix_log import CachedPrefixHashes, CachedPrefixLog
from specdec.reach.protocol import LeaseReference, Reference, RoomReference, new_id
from specdec.server.failures import Failure
from specdec.server.reach.bodies import VERSION, Asked, FetchFields, LendFields
from specdec.server.reach.lender import Lender
from specdec.server.reach.role import ServerRole
from specdec.server.settings import Role, ServerConfig
from specdec.server.threads import run_in_thread
from specdec.state_slots.transfer.plan import TransferPlan

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""Poll interval for leases held for others."""
RETRY = {"Retry-After": "1"}
LENT_SHARE: Mapping[Role, float] = {"prefill": 0.9, "decode": 0.0, "both": 0.5}
"""Fraction of memory that may be held for others: with role both, two servers could otherwise deadlock."""
UNLOST = {"fetched", "not_needed", "scored"}
"""Outcomes that are no failure to fetch."""


class Reach:
    """Owned by the event loop's thread, from before the server is ready until it has drained."""

    def __init__(
        self,
        role: Role,
        engine: SpecEngine,
        lender: Lender,
        peers: Peers[TransferPlan],
        fetcher: Fetcher,
        carrier: Carrier,
        config: ServerConfig,
        port: int,
    ) -> None:
        self.role, self.lender, self.peers, self.carrier, self.port = role, lender, peers, carrier, port
        self._engine, self._fetcher, self._config = engine, fetcher, config
        self._declining: set[asyncio.Task[None]] = set()
        """Tasks that tell other servers that a prompt is prefilled here."""
        self.unasked: Counter[str] = Counter()
        """Prompts not fetched by reason: each token must be computed here, or no lease was named."""

    @property
    def book(self) -> LeaseTable:
        """All leases."""
        return self.lender.book

    @property
    def fetched(self) -> FetchFigures:
        return self._fetcher.figures

    async def fetch(self, prepared: Sequence[PreparedPrompt], fields: Asked) -> None:
        """Fetch prefixes from another server; what cannot be fetched is prefilled, or an error per settings.

        A server that lends always prefills: that is the request.
        """
        fetch = fields.fetch if isinstance(fields, LendFields) else fields
        if fetch is None:
            return
        references = references_of(fetch, len(prepared))
        outcomes = await asyncio.gather(*map(self._fetch, prepared, references))
        lost = [outcome for outcome in outcomes if outcome not in UNLOST]
        if lost and fetch is fields and self._config.reach_on_failure == "fail":
            raise Failure(
                503,
                f"The prompt could not be fetched from the prefill instance ({lost[0]}).",
                code="prefill_lost",
                headers=RETRY,
            )

    async def _fetch(self, prepared: PreparedPrompt, reference: Reference | None) -> str:
        """Fetch one prompt; return the outcome."""
        ids, tenant = covered(prepared.ids, reference), prepared.terms.tenant
        if len(ids) == 1:
            return "not_needed"
        is_scored = prepared.params.prompt_logprobs is not None
        if reference and not is_scored:
            return (await self._fetcher.fetch(ids, tenant, reference)).outcome
        if reference:
            declining = asyncio.create_task(self._fetcher.decline(ids, tenant, reference))
            self._declining.add(declining)
            declining.add_done_callback(self._declining.discard)
        outcome = "scored" if is_scored else "no_lease"
        self.unasked[outcome] += 1
        return outcome

    async def stop(self) -> None:
        """Cancel declines; leases held for this server expire."""
        for declining in self._declining:
            declining.cancel()
        await asyncio.gather(*self._declining, return_exceptions=True)

    async def idle(self) -> None:
        """Wait until other servers have read or released all leases."""
        while self.book.figures.held and not self._engine.fault:
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def opened(
    role: ServerRole, engine: SpecEngine, folder: Path, config: ServerConfig, share: Callable[[str], float]
) -> AsyncIterator[Reach]:
    """Register the arena and serve the side channel within the context.

    `share` returns the fraction of lent memory that one caller's prompts may use.
    """
    transfers, settings = engine.transfers, engine.model.settings
    facts = await run_in_thread(lambda: facts_of(folder, engine.model.network.spec, settings), "facts")
    name = new_id()
    most_bytes = int(settings.memory_bytes * LENT_SHARE[role.role])
    leases = LeaseTable(
        name,
        block_tokens=settings.layout.block_tokens,
        most_bytes=most_bytes,
        lease_max_s=config.reach_lease_max,
        sums=transfers.sums,
    )
    async with contextlib.AsyncExitStack() as stack:
        carrier = await run_in_thread(lambda: Nixl(transfers.arena), "carrier")
        stack.push_async_callback(run_in_thread, carrier.close, "carrier")
        handshake = ArenaHandshake(name, facts, transfers.arena, carrier)
        peers = Peers(
            role.secret,
            role.allowed,
            fingerprint=handshake.fingerprint,
            facts=handshake.facts,
            attach=handshake.attach,
            detach=carrier.detach,
        )
        stack.push_async_callback(peers.stop)
        prefix_log = CachedPrefixLog(CachedPrefixHashes(transfers).now, epoch=name)
        channel = Channel(
            leases, channel_app(leases, role.secret, agents=handshake.agents, prefix_log=prefix_log)
        )
        stack.push_async_callback(channel.stop)
        host, port = config.reach_host, (await channel.start(config.reach_host, config.reach_port)).port
        logger.info("role %s: other servers reach this one at %s port %d", role.role, host, port)
        lender = Lender(role.secret, transfers, leases, host, port, most_bytes=most_bytes, share=share)
        limit_s, check = config.request_timeout, config.reach_check
        fetcher = Fetcher(transfers, carrier, peers, limit_s=limit_s, check=check)
        reach = Reach(role.role, engine, lender, peers, fetcher, carrier, config, port)
        stack.push_async_callback(reach.stop)
        yield reach


def references_of(fields: FetchFields, prompts: int) -> list[Reference | None]:
    """Return each prompt's reference; None if the request's fields do not suffice."""
    if fields.params is None:
        return [
            RoomReference(peer.host, peer.port, peer.room) if peer.host and peer.port else None
            for peer in fields.rooms
        ]
    params, signed = fields.params, fields.params.specdec
    host, port, engine = params.remote_host, params.remote_port, params.remote_engine_id
    leases = signed.leases if signed and signed.v == VERSION else None
    if leases is None or len(leases) != prompts or not (host and port and engine):
        return [None] * prompts
    return [
        LeaseReference(host, port, engine, peer.lease, peer.mac, peer.tokens) if peer else None
        for peer in leases
    ]


def covered(ids: Sequence[int], reference: Reference | None) -> Sequence[int]:
    """Return the part of a prompt that a reference covers, plus the next token."""
    tokens = reference.tokens if isinstance(reference, LeaseReference) else None
    return ids if tokens is None else ids[: tokens + 1]
