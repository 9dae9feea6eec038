"""An engine's leases: one prompt, one reader, one end, and the loan is returned once."""

import asyncio

import pytest

from specdec.errors import EngineError
from specdec.reach import expiring_map
from specdec.reach.messages import CloseRequest, HeartbeatRequest, OpenRequest
from specdec.reach.protocol import PrefixIdentity, ReachError
from tests.reach.peers import IDS, PROMPT, Lender, run, until

OTHER = PrefixIdentity.of([*IDS, 1])


def ask(lender: Lender, **other) -> OpenRequest:
    return OpenRequest(**lender.ask(**other))


def close(lender: Lender, *, read: bool = True, reader: str = "a" * 32) -> CloseRequest:
    return CloseRequest(engine=lender.engine, reader=reader, read=read)


async def refused(awaitable) -> str:
    with pytest.raises(ReachError) as caught:
        await awaitable
    return caught.value.reason


def closing(lender: Lender, lease, **other) -> str:
    with pytest.raises(ReachError) as caught:
        lender.book.close(lease.id, close(lender, **other))
    return caught.value.reason


def test_a_lease_without_heartbeats_ends() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = await lender.read()
        for _ in range(4):
            lender.clock.now_s += 29
            beat = HeartbeatRequest(engine=lender.engine, leases=[lease.id, "0" * 32])
            assert lender.book.beat(beat).leases == [lease.id]
        lender.clock.now_s += 30
        lender.book.sweep()
        assert loan.given_back == 1 and lender.book.figures.ended == {"lease_over": 1}
        assert await refused(lender.book.open(lease.id, ask(lender))) == "lease_over"
        assert lender.book.beat(beat).leases == []
        lender.clock.now_s += expiring_map.REMEMBERED_S
        assert await refused(lender.book.open(lease.id, ask(lender))) == "unknown_lease"

    run(test())


def test_a_lease_ends_however_alive_its_reader_is() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = await lender.read()
        for _ in range(14):
            lender.clock.now_s += 20
            await lender.book.open(lease.id, ask(lender))
        assert not loan.given_back
        lender.clock.now_s += 20
        assert await refused(lender.book.open(lease.id, ask(lender))) == "lease_over"
        assert loan.given_back == 1

    run(test())


def test_a_prompt_that_is_still_read_has_all_the_time_it_takes() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = lender.lend()
        lender.clock.now_s += 1000
        lender.book.sweep()
        assert not loan.given_back
        loan.read(10)
        await lender.book.finish(lease)
        lender.clock.now_s += 29
        lender.book.sweep()
        assert not loan.given_back and lender.book.expires_in(lease) == 1

    run(test())


def test_another_prompt_or_reader_is_refused_without_effect() -> None:
    async def test() -> None:
        lender = Lender()
        lease, _ = await lender.read()
        for other in (
            {"hash": OTHER.hash},
            {"hash": OTHER.hash, "length": OTHER.length},
            {"hash": PrefixIdentity.of(IDS, "salt").hash},
            {"length": 9},
        ):
            assert await refused(lender.book.open(lease.id, ask(lender, **other))) == "other_prompt"
        assert lease.reader is None
        assert await refused(lender.book.open(lease.id, ask(lender, num_cached=11))) == "malformed"
        await lender.book.open(lease.id, ask(lender))
        assert await refused(lender.book.open(lease.id, ask(lender, reader="b" * 32))) == "held"
        assert closing(lender, lease, reader="b" * 32) == "held"
        again = await lender.book.open(lease.id, ask(lender))
        assert again.blocks == [100, 101, 102], "an answer that was lost is given again"
        assert lender.book.close(lease.id, close(lender))
        assert lender.book.close(lease.id, close(lender)), "and so is this one"
        assert closing(lender, lease, reader="b" * 32) == "lease_over"
        assert await refused(lender.book.open(lease.id, ask(lender))) == "lease_over"
        assert lender.book.figures.closed_intact == 1

    run(test())


def test_another_engine_is_refused() -> None:
    async def test() -> None:
        lender, other = Lender(), Lender()
        lease, _ = await lender.read()
        assert await refused(lender.book.open(lease.id, ask(other))) == "other_engine"
        assert await refused(lender.book.open_room(1, ask(other))) == "other_engine"
        with pytest.raises(ReachError, match="another one"):
            lender.book.close(lease.id, close(other))
        with pytest.raises(ReachError, match="another one"):
            lender.book.beat(HeartbeatRequest(engine=other.engine, leases=[lease.id]))

    run(test())


@pytest.mark.parametrize("spoil", ["taken back", "moved", "another generation"])
def test_memory_that_changed_since_open_is_not_intact(spoil: str) -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = await lender.read()
        await lender.book.open(lease.id, ask(lender))
        if spoil == "taken back":
            loan.lent.intact = False
        elif spoil == "moved":
            loan.lent.blocks = (100, 101, 55)
        else:
            loan.lent.generations = (0, 9, 2, 1)
        assert not lender.book.close(lease.id, close(lender))
        assert not lender.book.close(lease.id, close(lender)), "nor the second time"
        assert lender.book.figures.closed_not_intact == 1 and loan.given_back == 1

    run(test())


def test_memory_that_moved_while_its_prompt_was_read_ends_the_lease() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = lender.lend()
        loan.read(8)
        assert (await lender.book.open(lease.id, ask(lender))).blocks == [100, 101]
        loan.read(10, first=200)
        assert await refused(lender.book.open(lease.id, ask(lender, num_cached=8))) == "lease_over"
        assert loan.given_back == 1

    run(test())


def test_a_partially_opened_prompt_is_not_intact() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = lender.lend()
        loan.read(8)
        await lender.book.open(lease.id, ask(lender))
        loan.read(10)
        await lender.book.finish(lease)
        assert not lender.book.close(lease.id, close(lender))
        lease, _ = await lender.read()
        assert not lender.book.close(lease.id, close(lender)), "it was never opened"
        lease, _ = await lender.read()
        await lender.book.open(lease.id, ask(lender))
        assert not lender.book.close(lease.id, close(lender, read=False))
        assert lender.book.figures.closed_unread == 1

    run(test())


def test_a_prompt_that_cannot_be_read_fails_its_client_and_its_reader_at_once() -> None:
    async def test() -> None:
        lender = Lender(wait_s=20)
        lease, loan = lender.lend(room=5)
        waiting = [
            asyncio.create_task(lender.book.finish(lease)),
            asyncio.create_task(lender.book.open_room(5, ask(lender))),
        ]
        await asyncio.sleep(0.01)
        loan.done.set_exception(EngineError("the engine has failed"))
        with pytest.raises(EngineError, match="has failed"):
            await waiting[0]
        assert await refused(waiting[1]) == "prefill_failed"
        assert await refused(lender.book.open_room(5, ask(lender))) == "prefill_failed"
        assert loan.given_back == 1

    run(test())


def test_a_client_that_leaves_before_the_end_ends_the_lease() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = lender.lend(room=5)
        client = asyncio.create_task(lender.book.finish(lease))
        await asyncio.sleep(0.01)
        client.cancel()
        await asyncio.wait([client])
        assert loan.given_back == 1 and lease.end_reason == "prefill_failed"
        loan.read(10)  # the engine was already computing it
        await asyncio.sleep(0.01)
        lender.book.cancel(lease)
        lender.book.end_all()
        assert loan.given_back == 1 and lender.book.figures.held == 0

    run(test())


def test_a_reader_that_closes_early_ends_the_prefill_and_the_client_gets_its_answer() -> None:
    async def test() -> None:
        lender = Lender()
        lease, loan = lender.lend(room=5)
        await lender.book.open_room(5, ask(lender))
        client = asyncio.create_task(lender.book.finish(lease))
        await asyncio.sleep(0.01)
        assert not lender.book.close(lease.id, close(lender, read=False))
        await client
        assert loan.given_back == 1

    run(test())


def test_leases_and_bytes_are_bounded() -> None:
    async def test() -> None:
        lender = Lender(most_leases=3)
        for _ in range(3):
            lender.lend(num_bytes=1)
        with pytest.raises(ReachError, match="3 prompts of 999 bytes wait") as caught:
            lender.lend(num_bytes=1)
        assert caught.value.status == 503 and len(lender.loans) == 3, "nothing was submitted"
        lender = Lender()
        lender.lend(num_bytes=999)
        with pytest.raises(ReachError, match="no memory for one more"):
            lender.lend(num_bytes=2)
        lender.book.end_all()
        assert lender.loans[0].given_back == 1
        with pytest.raises(ReachError, match="is stopping"):
            lender.lend()

    run(test())


def test_a_prompt_refused_by_the_engine_leaves_no_lease() -> None:
    async def test() -> None:
        lender = Lender()

        def submit(on_change):
            raise EngineError("no")

        with pytest.raises(EngineError):
            lender.book.lend(submit, PROMPT, num_bytes=1, room=5)
        assert lender.book.figures.held == 0
        lender.book.rooms.check_free(5)

    run(test())


def test_remembered_leases_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        lender = Lender()
        for room in range(expiring_map.MOST + 50):
            lease, _ = lender.lend(room=room)
            lender.book.cancel(lease)
            lender.book.rooms.fail(10**9 + room)
        assert len(lender.book._ended) == len(lender.book.rooms._ended) == expiring_map.MOST
        lender.clock.now_s += expiring_map.REMEMBERED_S
        lender.book.rooms.check_free(room)
        assert len(lender.book.rooms._ended) == 0

    run(test())


def test_the_device_is_waited_for_after_the_engine() -> None:
    """The engine's thread runs ahead of the device, and the device's progress triggers no callback."""

    async def test() -> None:
        lender = Lender(wait_s=20)
        lease, loan = lender.lend()
        loan.read(10)
        await lender.book.finish(lease)
        loan.lent.ready = 4
        first = await lender.book.open(lease.id, ask(lender))
        assert (first.ready, first.blocks, first.state) == (4, [100], None)
        opening = asyncio.create_task(lender.book.open(lease.id, ask(lender, num_cached=4)))
        await asyncio.sleep(0.02)
        assert not opening.done()
        loan.lent.ready = 10
        assert (await opening).blocks == [101, 102]

    run(test())


def test_an_unknown_room_keeps_nothing() -> None:
    async def test() -> None:
        lender = Lender(wait_s=0.05)
        asks = [asyncio.create_task(lender.book.open_room(room % 50, ask(lender))) for room in range(1100)]
        reasons = [await refused(own) for own in asks]
        assert reasons.count("busy") == 1100 - 1024 and set(reasons) == {"busy", "unknown_room"}
        rooms = lender.book.rooms
        assert not rooms._waiting and not rooms._rooms and not len(rooms._ended) and not rooms._num_waiting
        left = asyncio.create_task(lender.book.open_room(1, ask(lender)))
        await until(lambda: rooms._num_waiting == 1)
        left.cancel()
        await asyncio.wait([left])
        assert not rooms._waiting and not rooms._num_waiting

    run(test())


def test_a_room_is_of_one_prompt_and_serves_once() -> None:
    async def test() -> None:
        lender = Lender(wait_s=0.05)
        lease, _ = await lender.read(room=5)
        assert await refused(lender.book.open_room(5, ask(lender, hash=OTHER.hash))) == "other_prompt"
        with pytest.raises(ReachError, match="draw a new random number"):
            lender.lend(room=5)
        await lender.book.open_room(5, ask(lender))
        assert await refused(lender.book.open_room(5, ask(lender, reader="b" * 32))) == "held"
        assert lender.book.close(lease.id, close(lender))
        assert await refused(lender.book.open_room(5, ask(lender))) == "room_used"
        with pytest.raises(ReachError, match="draw a new random number"):
            lender.lend(room=5)
        lender.book.rooms.fail(5)
        assert await refused(lender.book.open_room(5, ask(lender))) == "room_used"
        await lender.read(room=6)
        lender.clock.now_s += 31
        assert await refused(lender.book.open_room(6, ask(lender))) == "lease_over"
        lender.book.rooms.fail(7)
        assert await refused(lender.book.open_room(7, ask(lender))) == "prefill_failed"

    run(test())


def test_a_reader_waiting_for_a_room_gets_a_refusal_at_once() -> None:
    async def test() -> None:
        lender = Lender(wait_s=25)
        waiting = asyncio.create_task(lender.book.open_room(5, ask(lender)))
        await until(lambda: lender.book.figures.rooms_waiting)
        lender.book.rooms.fail(6)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        lender.book.rooms.fail(5)
        assert await refused(waiting) == "prefill_failed"

    run(test(), 10)
