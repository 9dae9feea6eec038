"""The second turn of a conversation: the decode instance lends its cache for the next prefill."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.outputs import RequestStats
from specdec.core.params import PreparedPrompt
from specdec.engine import incoming
from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.fetch import Fetched
from specdec.reach.protocol import LeaseReference
from specdec.server.reach import lender
from specdec.server.reach.bodies import FetchFields, TransferParams
from specdec.server.reach.lender import Lender
from specdec.server.reach.reach import covered, references_of
from specdec.state_slots.prefix.rates import TierRates
from tests.reach.engines import HOST, SECRET, Side, side
from tests.reach.test_fetch import FIELDS, PARAMS, prompt, run
from tests.selection import EXHAUSTIVE

LONGER = {**FIELDS, "max_model_len": 256}
CELLS = [
    *((family, drafter) for family in ("qwen3_5", "nemotron_h") for drafter in ("mtp", "none")),
    *(("qwen3", drafter) for drafter in ("eagle", "suffix")),
]


@dataclasses.dataclass
class Server:
    """One engine as a server of role both."""

    side: Side
    lender: Lender

    async def lend(
        self, ids: Sequence[int], *, cached_only: bool = False, salt: str = "", caller: str = ""
    ) -> tuple[LeaseReference | None, RequestStats]:
        """Lend a prompt, or its cached part; return the reference to it, and the request's statistics."""
        prepared = self.prepared(ids, salt, caller)
        lending = self.lender.lend_cached([prepared]) if cached_only else self.lender.lend([prepared], None)
        (loaned,) = await lending
        stats = await loaned.read()
        told = TransferParams.model_validate(self.lender.transfer_params([loaned]))
        (reference,) = references_of(FetchFields(told, ()), 1)
        assert reference is None or isinstance(reference, LeaseReference)
        assert told.remote_num_tokens == (reference.tokens if reference else 0)
        return reference, stats

    async def cached(self, ids: Sequence[int], **own: str) -> LeaseReference | None:
        return (await self.lend(ids, cached_only=True, **own))[0]

    def prepared(self, ids: Sequence[int], salt: str = "", caller: str = "") -> PreparedPrompt:
        params = SamplingParams(max_tokens=1, cache_salt=salt or None)
        return self.side.engine.prepare(list(ids), params, tenant=Tenant(caller))

    async def fetch(self, ids: Sequence[int], reference: LeaseReference, tenant: Tenant = SOLE) -> Fetched:
        return await self.side.fetcher.fetch(covered(ids, reference), tenant, reference)

    async def say(self, ids: Sequence[int], params: SamplingParams = PARAMS) -> tuple[int, ...]:
        return await self.side.say(ids, params)


@asynccontextmanager
async def servers(folder: Path, **fields: Any) -> AsyncIterator[tuple[Server, Server]]:
    """Start a prefill and a decode instance that may fetch from each other."""
    fields = {**LONGER, **fields}
    async with side(folder, **fields) as reader, side(folder, peer=reader, **fields) as writer:
        reader.peers._allowed = AllowedPeers([HOST], writer.channel.port)
        yield server(reader), server(writer)
        await reader.settle()
        await writer.settle()


def server(own: Side, most_bytes: int = 1 << 40) -> Server:
    transfers, port = own.engine.transfers, own.channel.port
    return Server(own, Lender(SECRET, transfers, own.book, HOST, port, most_bytes=most_bytes))


@pytest.fixture(autouse=True)
def _always_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch everything that is lent, whatever the machine's speeds."""
    monkeypatch.setattr(incoming, "WORTH_FETCHING", 8)
    monkeypatch.setattr(lender, "WORTH_FETCHING", 8)
    monkeypatch.setattr(TierRates, "pays", lambda *_: True)


@pytest.mark.parametrize(("family", "drafter"), CELLS)
def test_a_conversation_goes_back_and_forth(
    family_folder: Callable[..., Path], family: str, drafter: str
) -> None:
    folder = family_folder(family)
    own: dict[str, Any] = {"draft": drafter}
    if drafter == "none":
        own |= {"num_steps": None, "adaptive": True}
    if drafter == "eagle":
        own["draft_model"] = str(folder / "eagle3")

    async def test() -> None:
        async with servers(folder, **own) as (reader, writer), side(folder, **{**LONGER, **own}) as alone:
            ids, known = prompt(1, 50), 0
            for turn in range(3):
                reference = await writer.cached(ids)
                assert (reference is None) == (turn == 0), "at first there is nothing"
                if reference and reference.tokens:
                    assert known - 2 <= reference.tokens < known, "the last token was chosen, and not read"
                    fetched = await reader.fetch(ids, reference)
                    assert fetched.outcome == "fetched" and fetched.tokens >= 16
                lent, stats = await reader.lend(ids)
                assert lent and lent.tokens == len(ids) - 1
                assert stats.cached_tokens >= max(known - 3, 0), "only what is new was read"
                assert (await writer.fetch(ids, lent)).outcome == "fetched"
                said = await writer.say(ids)
                assert said == await alone.say(ids, PARAMS)
                known = len(ids) + len(said)
                ids = [*ids, *said, *prompt(turn + 10, 33)]

    run(test())


def test_lending_a_cached_prefix_prefills_nothing(folder: Path) -> None:
    async def test() -> None:
        async with servers(folder) as (_, writer):
            ids = prompt(1)
            said = await writer.say(ids)
            steps: list[Any] = []
            writer.side.engine.model.loop.observers.append(steps.append)
            reference, stats = await writer.lend([*ids, *said, *prompt(2)[:9]], cached_only=True)
            assert reference and reference.tokens == stats.cached_tokens == len(ids) + len(said) - 1
            assert not steps
            assert await writer.cached(prompt(3)) is None and not steps
            writer.side.take_back()

    run(test())


def test_short_prompts_and_those_cached_elsewhere_are_not_lent(folder: Path) -> None:
    async def test() -> None:
        async with servers(folder) as (_, writer):
            ids = prompt(1)
            ids += await writer.say(ids)
            assert await writer.cached(ids, salt="s") is None and await writer.cached(ids, caller="c") is None
            assert await writer.cached(ids[:1]) is None and await writer.cached(prompt(2)) is None
            short = prompt(4)[:5]
            short += await writer.say(short, SamplingParams(max_tokens=2, ignore_eos=True))
            assert await writer.cached([*short, 1]) is None, "fewer than are worth fetching"
            assert not writer.side.book.figures.held
            assert await writer.cached(ids), "the control"
            writer.side.take_back()

    run(test())


def test_lending_a_cached_prefix_does_not_wait_for_memory(folder: Path) -> None:
    async def test() -> None:
        async with servers(folder) as (_, writer):
            ids = prompt(1)
            ids += await writer.say(ids)
            layout = writer.side.engine.transfers.arena.layout
            one = server(writer.side, writer.side.book.charge(layout.sequence_bytes(len(ids) - 1)))
            first = await one.cached(ids)
            assert first and await one.cached(ids) is None, "there is room for one"
            waits = asyncio.create_task(one.lend(ids))
            await asyncio.sleep(0.05)
            writer.side.take_back()
            assert await one.cached(ids) is None, "others wait for that"
            assert (await waits)[0]
            writer.side.take_back()
            assert await one.cached(ids)
            writer.side.take_back()

    run(test())


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"tokens": 140}, "bad_mac"),
        ({"tokens": 1 << 40}, "bad_mac"),
        ({"tokens": 152}, "bad_mac"),
        ({"tokens": None}, "bad_mac"),
        ({"mac": "0" * 64}, "bad_mac"),
        ({"lease": "0" * 32}, "bad_mac"),
        ({"engine": "0" * 32}, "bad_mac"),
        ({"host": "192.0.2.1"}, "not_allowed"),
    ],
)
def test_unsigned_references_are_prefilled_locally(
    folder: Path, change: dict[str, Any], outcome: str
) -> None:
    async def test() -> None:
        async with servers(folder) as (reader, writer):
            ids = prompt(1)
            ids = [*ids, *await writer.say(ids), *prompt(2)[:9]]
            reference = await writer.cached(ids)
            assert reference and reference.tokens == 153
            forged = dataclasses.replace(reference, **change)
            assert (await reader.fetch(ids, forged)).outcome == outcome
            assert reader.side.fetcher.figures.outcomes[outcome] == 1  # type: ignore[index]
            lent, stats = await reader.lend(ids)
            assert lent and not stats.cached_tokens
            assert (await writer.fetch(ids, lent)).outcome == "fetched"
            assert await writer.say(ids) == await reader.say(ids)
            writer.side.take_back()

    run(test())


def test_loans_of_another_prompt_are_prefilled_locally(folder: Path) -> None:
    async def test() -> None:
        async with servers(folder) as (reader, writer):
            ids = prompt(1)
            said = await writer.say(ids)
            reference = await writer.cached([*ids, *said])
            assert reference
            other = [*prompt(2), *said, 1]
            shorter = [*ids, *said[:-3]]
            for own, tenant in ((other, SOLE), (shorter, SOLE), ([*ids, *said], Tenant(salt="s"))):
                assert (await reader.fetch(own, reference, tenant)).outcome == "bad_mac"
                assert await reader.say(own) == await writer.say(own)
            assert (await reader.fetch([*ids, *said, 1, 2, 3], reference)).outcome == "not_needed", (
                "it has it"
            )
            writer.side.take_back()

    run(test())


def test_evicted_prefixes_are_prefilled_locally(folder: Path) -> None:
    """A prefix may be evicted between two steps, before it is lent or after its lease has ended."""

    async def test() -> None:
        async with servers(folder) as (reader, writer):
            ids = prompt(1)
            ids = [*ids, *await writer.say(ids), *prompt(2)[:9]]
            transfers = writer.side.engine.transfers
            cached = transfers.cached

            def stale(prepared: PreparedPrompt) -> Any:
                found = cached(prepared)
                found.result(10)
                writer.side.engine.flush()
                return found

            transfers.cached = stale  # type: ignore[method-assign]
            reference, stats = await writer.lend(ids, cached_only=True)
            assert reference and not stats.cached_tokens, "it was read again: a lease says how much it holds"
            writer.side.take_back()
            assert (await reader.fetch(ids, reference)).outcome in ("unknown_lease", "lease_over")
            assert await reader.say(ids) == await writer.say(ids)

    run(test())


@EXHAUSTIVE
def test_random_conversations_equal_one_engine(folder: Path) -> None:
    """Some branch off, some are evicted on either side, some continue while others are in flight."""

    async def talk(draw: random.Random, servers: Sequence[Server], alone: Side) -> None:
        ids = prompt(draw.randrange(3), draw.choice((15, 16, 17, 31, 33, 48, 60)))
        for _ in range(draw.randrange(1, 5)):
            reader, writer = draw.sample(servers, 2) if draw.random() < 0.3 else servers
            if draw.random() < 0.15:
                await asyncio.to_thread(draw.choice(servers).side.engine.flush)
            reference = await writer.cached(ids)
            if reference:
                if draw.random() < 0.1:
                    reference = dataclasses.replace(reference, tokens=draw.randrange(1, 300))
                await reader.fetch(ids, reference)
            lent, _ = await reader.lend(ids)
            if lent:
                await writer.fetch(ids, lent)
            params = PARAMS.model_copy(update={"max_tokens": draw.choice((1, 2, 14, 15, 16, 17, 24))})
            said = await writer.say(ids, params)
            assert said == await alone.say(ids, params)
            kept = draw.randrange(len(ids)) if draw.random() < 0.2 else len(ids)
            ids = [*ids[:kept], *said, *prompt(draw.randrange(99), draw.choice((1, 7, 16)))]

    async def test() -> None:
        draw = random.Random(24)
        async with servers(folder) as both, side(folder, **LONGER) as alone:
            for _ in range(4):
                await asyncio.gather(*(talk(random.Random(draw.random()), both, alone) for _ in range(5)))
            for own in both:
                own.side.take_back()
                figures = own.side.fetcher.figures.outcomes
                assert figures["fetched"] > 5 and not set(figures) - {"fetched", "not_needed", "bad_mac"}

    run(test())
