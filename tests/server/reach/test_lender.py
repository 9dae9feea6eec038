"""What a server lends: the order in which requests start, the messages about it, and its release."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec import SamplingParams, SpecEngine
from specdec.config.tenant import Tenant
from specdec.core.params import PreparedPrompt
from specdec.reach.lease_table import MOST_LEASES, LeaseTable
from specdec.reach.messages import CloseRequest, OpenRequest
from specdec.reach.protocol import LeaseReference, PrefixIdentity, ReachError, Secret, new_id
from specdec.server.failures import Failure
from specdec.server.reach.bodies import LendFields
from specdec.server.reach.lender import Lender
from tests.reach.peers import until

SECRET = Secret("a-secret-of-the-tests")
IDS = list(range(5, 105))
LIMIT_S = 30.0


@asynccontextmanager
async def lending(
    folder: Path, prompts: float = 8.0, share: float = 1.0, most_leases: int = MOST_LEASES
) -> AsyncIterator[tuple[SpecEngine, Lender]]:
    """Lend from memory for `prompts` prompts of `IDS`, of which each caller may use `share`."""
    engine = await asyncio.to_thread(SpecEngine, folder, draft="none", memory_bytes=1 << 25)
    try:
        layout = engine.transfers.arena.layout
        most_bytes = int(prompts * layout.sequence_bytes(len(IDS) - 1))
        book = LeaseTable(
            new_id(), block_tokens=layout.block_tokens, most_bytes=most_bytes, most_leases=most_leases
        )
        yield (
            engine,
            Lender(
                SECRET,
                engine.transfers,
                book,
                "10.0.0.1",
                5600,
                most_bytes=most_bytes,
                share=lambda caller: share,
            ),
        )
    finally:
        await asyncio.to_thread(engine.close)


def prepared(engine: SpecEngine, count: int = 1, salt: str | None = None) -> list[PreparedPrompt]:
    params = SamplingParams(max_tokens=1, cache_salt=salt)
    return [engine.prepare([*IDS[:-1], index + 1], params) for index in range(count)]


def of_caller(engine: SpecEngine, caller: str, count: int) -> list[PreparedPrompt]:
    tenant = Tenant(caller)
    return [own._replace(terms=own.terms._replace(tenant=tenant)) for own in prepared(engine, count)]


def ask(lender: Lender) -> OpenRequest:
    prompt = PrefixIdentity.of(IDS[:-1])
    return OpenRequest(
        engine=lender.book.engine, hash=prompt.hash, length=prompt.length, num_cached=0, reader=new_id()
    )


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(bounded())


def test_transfer_params_are_signed_per_prompt_and_salt(hybrid: Path) -> None:
    async def test() -> None:
        async with lending(hybrid) as (engine, lender):
            asked = [*prepared(engine, 2, "salt"), engine.prepare([7], SamplingParams(max_tokens=1))]
            loaned = await lender.lend(asked, None)
            stats = [await own.read() for own in loaned]
            assert [(own.prompt_tokens, own.output_tokens) for own in stats] == [(100, 0), (100, 0), (1, 0)]
            told = lender.transfer_params(loaned)
            first, second, none = told["specdec"]["leases"]
            assert none is None, "of one token nothing is read"
            assert told["remote_request_id"] == first["lease"] != second["lease"]
            assert told["remote_num_tokens"] == len(IDS) - 1
            reference = LeaseReference("", 0, told["remote_engine_id"], first["lease"], first["mac"])
            assert SECRET.verifies(reference, PrefixIdentity.of(asked[0].ids[:-1], "salt"))
            assert not SECRET.verifies(reference, PrefixIdentity.of(asked[0].ids[:-1]))
            assert not SECRET.verifies(reference, PrefixIdentity.of(asked[0].ids[:-2], "salt"))
            for own in loaned:
                own.give_up()
            assert not lender.book.figures.held

    run(test)


def test_prompts_waiting_for_memory_start_in_order(hybrid: Path) -> None:
    async def test() -> None:
        async with lending(hybrid, prompts=2.5) as (engine, lender):
            held = await lender.lend(prepared(engine, 2), None)
            begun: list[int] = []

            async def lend(number: int, count: int) -> None:
                loaned = await lender.lend(prepared(engine, count), None)
                begun.append(number)
                for own in loaned:
                    await own.read()
                    own.give_up()

            tasks = [asyncio.create_task(lend(0, 2)), asyncio.create_task(lend(1, 1))]
            await asyncio.sleep(0.1)
            assert not begun, "the second would fit, once the first is given up, before the one ahead of it"
            held[0].give_up()
            await asyncio.sleep(0.1)
            assert not begun
            held[1].give_up()
            await asyncio.gather(*tasks)
            assert begun == [0, 1] and not lender.book.figures.held

    run(test)


@pytest.mark.parametrize("most_leases", [MOST_LEASES, 5])
def test_one_keys_loans_leave_memory_for_others(hybrid: Path, most_leases: int) -> None:
    """The first caller's prompts are never fetched and more of them wait; the second is not delayed.

    This holds for both limits, memory and the number of leases.
    """

    async def test() -> None:
        prompts = 4.5 if most_leases == MOST_LEASES else 400.0
        async with lending(hybrid, prompts, share=0.5, most_leases=most_leases) as (engine, lender):
            held = await lender.lend(of_caller(engine, "first", 2), None)
            greedy = asyncio.create_task(lender.lend(of_caller(engine, "first", 1), None))
            await asyncio.sleep(0.1)
            assert not greedy.done()
            others = await lender.lend(of_caller(engine, "second", 2), None)
            for own in [*held, *others]:
                own.give_up()
            for own in await greedy:
                own.give_up()
            assert not lender.book.figures.held

    run(test)


@pytest.mark.parametrize(("prompts", "share"), [(1.5, 1.0), (3.0, 0.5)])
def test_a_prompt_larger_than_the_share_is_refused(hybrid: Path, prompts: float, share: float) -> None:
    """A request must not exceed its caller's share, since it could never start."""

    async def test() -> None:
        async with lending(hybrid, prompts, share) as (engine, lender):
            with pytest.raises(Failure) as caught:
                await lender.lend(prepared(engine, 2), None)
            assert caught.value.status == 503 and caught.value.code == "capacity"
            assert not lender.book.figures.held

    run(test)


def test_a_duplicate_room_cancels_the_other_prompts(hybrid: Path) -> None:
    async def test() -> None:
        async with lending(hybrid) as (engine, lender):
            held = await lender.lend(prepared(engine), [1])
            with pytest.raises(Failure) as caught:
                await lender.lend(prepared(engine, 2), [2, 1])
            assert caught.value.status == 409 and caught.value.param == "bootstrap_room"
            assert lender.book.figures.held == 1
            held[0].give_up()

    run(test)


def test_readers_waiting_in_a_room_get_the_failure(hybrid: Path) -> None:
    async def test() -> None:
        async with lending(hybrid, prompts=1.5) as (engine, lender):
            held = await lender.lend(prepared(engine), None)
            waiting = asyncio.create_task(lender.book.open_room(3, ask(lender)))

            async def request() -> None:
                with lender.notifying_readers(LendFields((3,))):
                    await lender.lend(prepared(engine), [3])

            asking = asyncio.create_task(request())
            await asyncio.sleep(0.05)
            asking.cancel()  # its client disconnected while it waited for memory
            with pytest.raises(ReachError) as caught:
                await waiting
            assert caught.value.reason == "prefill_failed"
            held[0].give_up()

    run(test)


def test_prompts_whose_readers_gave_up_are_not_prefilled(hybrid: Path) -> None:
    """Otherwise it is held in vain, those behind it give up in turn, and so on while requests arrive."""

    async def test() -> None:
        async with lending(hybrid, prompts=1.5) as (engine, lender):
            held = await lender.lend(prepared(engine), None)
            rooms = lender.book.rooms
            readers = [asyncio.create_task(lender.book.open_room(room, ask(lender))) for room in (3, 4)]
            lendings = [asyncio.create_task(lender.lend(prepared(engine), [room])) for room in (3, 4, 5)]
            await until(lambda: len(rooms._expected) == 3)
            readers[0].cancel()
            await asyncio.wait([readers[0]])
            (left,) = await lendings[0]
            assert left.lease is None and (await left.read()).prompt_tokens == len(IDS)
            with pytest.raises(ReachError) as caught:
                await lender.book.open_room(3, ask(lender))
            assert caught.value.reason == "prefill_failed", "it may have been late, and hears so at once"
            held[0].give_up()
            (waited,) = await lendings[1]
            assert waited.lease and (await readers[1]).lease == waited.lease.id
            waited.give_up()
            (unasked,) = await lendings[2]
            assert unasked.lease, "its reader may still come"
            unasked.give_up()
            assert not rooms._expected and not lender.book.figures.held

    run(test)


def test_a_reader_that_is_done_before_the_answer_takes_nothing_from_it(hybrid: Path) -> None:
    """In a room the prompt may have been fetched, or declined, before its request is answered here."""

    async def test() -> None:
        async with lending(hybrid) as (engine, lender):
            for read in (True, False):
                room = 10 + read
                (own,) = await lender.lend(prepared(engine), [room])
                reader = new_id()
                assert own.lease
                close = CloseRequest(engine=lender.book.engine, reader=reader, read=False)
                if read:
                    await own.read()
                lender.book.close(own.lease.id, close)
                assert (await own.read()).prompt_tokens == len(IDS)
                own.give_up()

    run(test)
