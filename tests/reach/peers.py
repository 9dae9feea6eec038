"""Two sides of a side channel over real HTTP on loopback, with a simulated engine that lends."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import torch

from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.channel import Channel, channel_app
from specdec.reach.lease_table import LeaseTable
from specdec.reach.messages import AgentInfo, AgentsResponse, pack
from specdec.reach.peers import Peers
from specdec.reach.prefix_log import CachedPrefixLog
from specdec.reach.protocol import LeaseReference, PrefixIdentity, RoomReference, Secret, hash_facts, new_id
from specdec.reach.signed import SignedRequest

SECRET = "a-secret-of-the-tests"
FACTS = {"model": "tiny", "dtype": "float32"}
BLOCK_TOKENS = 4
IDS = list(range(10, 20))
PROMPT = PrefixIdentity.of(IDS)


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Lent:
    """Prefill progress of the simulated engine."""

    def __init__(self, length: int) -> None:
        self.length, self.ready, self.intact = length, 0, True
        self.blocks: tuple[int, ...] = ()
        self.generations: tuple[int, ...] = ()
        self.state: int | None = None

        self.hidden_1D: torch.Tensor | None = None


class Loan:
    def __init__(self, length: int, on_change: Callable[[Any], None]) -> None:
        self.lent, self.done = Lent(length), Future[Any]()
        self._on_change = on_change
        self.given_back = 0

    def give_back(self) -> None:
        self.given_back += 1
        self.lent.intact = False

    def read(self, tokens: int, first: int = 100) -> None:
        """Advance to that many tokens; `first` is the id of the first block."""
        blocks = -(-tokens // BLOCK_TOKENS) if tokens == self.lent.length else tokens // BLOCK_TOKENS
        self.lent.blocks = tuple(range(first, first + blocks))
        self.lent.generations = tuple(range(blocks))
        self.lent.ready = tokens
        if tokens == self.lent.length:
            self.lent.state, self.lent.hidden_1D = 7, torch.arange(3, dtype=torch.bfloat16)
            self.lent.generations += (1,)
        self._on_change(self.lent)
        if tokens == self.lent.length:
            self.done.set_result(self.lent)


@dataclass
class Lender:
    """The prefill side: an engine, its book and its side channel."""

    clock: Clock = field(default_factory=Clock)
    secret: Secret = field(default_factory=lambda: Secret(SECRET))
    facts: dict[str, str] = field(default_factory=lambda: dict(FACTS))
    engine: str = field(default_factory=new_id)
    wait_s: float = 0.3
    most_leases: int = 8
    wall_clock: Callable[[], float] = time.time
    kept: set[tuple[int, int]] = field(default_factory=set)
    loans: list[Loan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.book = LeaseTable(
            self.engine,
            block_tokens=BLOCK_TOKENS,
            most_bytes=1000,
            most_leases=self.most_leases,
            clock=self.clock,
            wait_s=self.wait_s,
        )

    def lend(
        self, prompt: PrefixIdentity = PROMPT, *, room: int | None = None, num_bytes: int = 10
    ) -> tuple[Any, Loan]:
        def submit(on_change: Callable[[Any], None]) -> Loan:
            self.loans.append(Loan(prompt.length, on_change))
            return self.loans[-1]

        lease = self.book.lend(submit, prompt, num_bytes=num_bytes, room=room)
        return lease, self.loans[-1]

    async def read(self, prompt: PrefixIdentity = PROMPT, *, room: int | None = None) -> tuple[Any, Loan]:
        """Lend a prompt whose prefill is complete."""
        lease, loan = self.lend(prompt, room=room)
        loan.read(prompt.length)
        await self.book.finish(lease)
        return lease, loan

    async def now(self) -> set[tuple[int, int]]:
        return self.kept

    def agents(self) -> AgentsResponse:
        agent = AgentInfo(rank=0, metadata=pack(b"agent"), arena={"base": 1})
        return AgentsResponse(
            engine=self.engine,
            fingerprint=hash_facts(self.facts),
            facts=self.facts,
            carrier="copies",
            agents=[agent],
        )

    @contextlib.asynccontextmanager
    async def listening(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator["Lender"]:
        kept = CachedPrefixLog(self.now, epoch=self.engine, clock=self.clock)
        app = channel_app(
            self.book, self.secret, agents=self.agents, prefix_log=kept, clock=lambda: self.wall_clock()
        )
        self.channel = await Channel(self.book, app).start(host, port)
        self.port = self.channel.port
        try:
            yield self
        finally:
            await self.channel.stop()
            assert all(loan.given_back == 1 for loan in self.loans), "each once, whatever happened"
            assert self.book.figures.held == self.book.figures.held_bytes == 0

    def reference(self, lease: Any, /, **other: Any) -> LeaseReference:
        mac = self.secret.sign(self.engine, lease.id, lease.prompt)
        own = {"host": "127.0.0.1", "port": self.port, "engine": self.engine, "lease": lease.id, "mac": mac}
        return LeaseReference(**(own | other))

    def room(self, room: int) -> RoomReference:
        return RoomReference("127.0.0.1", self.port, room)

    async def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send plain HTTP, signed unless other headers are given."""
        data = b"" if body is None else json.dumps(body).encode()
        signed = SignedRequest.new(method, path, data)
        sent = {"Authorization": signed.authorization(self.secret)} if headers is None else headers
        url = f"http://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, headers=sent, data=data) as response,
        ):
            data = await response.read()
            return response.status, readable(signed, response.status, data, encrypted=headers is None)

    def ask(self, prompt: PrefixIdentity = PROMPT, **other: Any) -> dict[str, Any]:
        own = {"engine": self.engine, "hash": prompt.hash, "length": prompt.length, "num_cached": 0}
        return own | {"reader": "a" * 32} | other


def readable(signed: SignedRequest, status: int, data: bytes, *, encrypted: bool = True) -> Any:
    """Return a response's JSON, which is encrypted if the request had a valid signature."""
    opened = signed.decrypt(Secret(SECRET), status, data)
    assert (opened is not None) == encrypted, "is the answer encrypted?"
    return json.loads(data if opened is None else opened)


class Attached:
    """A stand-in for a carrier that records attached peers."""

    def __init__(self) -> None:
        self._engines: dict[str, str] = {}
        self.error: Exception | None = None

    @property
    def engines(self) -> list[str]:
        return [*self._engines.values()]

    def attach(self, name: str, agents: AgentsResponse) -> str:
        if self.error:
            raise self.error
        self._engines[name] = agents.engine
        return f"plan of {agents.engine}"

    def detach(self, name: str) -> None:
        del self._engines[name]


@contextlib.asynccontextmanager
async def reading(
    *ports: int, clock: Clock | None = None, secret: str = SECRET, beat_s: float = 0.05
) -> AsyncIterator[tuple[Peers[str], Attached]]:
    """Yield the decode side: a client of the lenders at some ports."""
    attached = Attached()
    peers = Peers(
        Secret(secret),
        AllowedPeers([f"127.0.0.1:{port}" for port in ports], 5600),
        fingerprint=hash_facts(FACTS),
        facts=FACTS,
        attach=attached.attach,
        detach=attached.detach,
        clock=clock or Clock(),
        beat_s=beat_s,
    )
    try:
        yield peers, attached
    finally:
        await peers.stop()


def run(test: Coroutine[Any, Any, None], limit_s: float = 30.0) -> None:
    """Run a test's coroutine with a time limit."""

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await test

    asyncio.run(bounded())


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition is true."""
    while not is_so():
        await asyncio.sleep(0.005)
