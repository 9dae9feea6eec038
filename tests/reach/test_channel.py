"""Both sides of the side channel: a prompt is lent, opened, closed, and nothing else gets at it."""

import asyncio

import pytest
import torch

from specdec.reach.terms import Prompt, Refusal
from tests.reach.peers import IDS, PROMPT, Lender, reading, run, until


async def refused(awaitable) -> str:
    with pytest.raises(Refusal) as caught:
        await awaitable
    return caught.value.reason


def test_a_lease_is_opened_read_and_closed() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, attached):
            lease, loan = await lender.read()
            reference = lender.reference(lease)
            pair = await peers.meet(reference, PROMPT)
            assert pair.plan == f"plan of {lender.engine}" and attached.engines == [lender.engine]
            async with peers.hold(pair, reference, PROMPT) as hold:
                opened = await peers.open(hold, 4)
                assert (opened.ready, opened.first, opened.blocks, opened.state) == (10, 1, [101, 102], 7)
                assert opened.is_whole and opened.hidden
                assert torch.equal(opened.hidden.tensor, torch.arange(3, dtype=torch.bfloat16))
                assert not loan.given_back
                assert await peers.close(hold, read=True)
            assert loan.given_back == 1
            assert await peers.meet(reference, PROMPT) is pair, "one handshake serves all"
            assert peers.figures.handshakes == 1
            assert lender.book.figures.closed_intact == lender.book.figures.opened == 1

    run(test())


def test_a_room_tells_blocks_while_its_prompt_is_still_read() -> None:
    async def test() -> None:
        async with Lender(wait_s=5).listening() as lender, reading(lender.port) as (peers, _):
            reference = lender.room(2**63 - 1)
            pair = await peers.meet(reference, PROMPT)
            async with peers.hold(pair, reference, PROMPT) as hold:
                first = asyncio.create_task(peers.open(hold, 0))
                await until(lambda: lender.book.figures.rooms_waiting == 1)
                lease, loan = lender.lend(room=reference.room)
                loan.read(5)
                opened = await first
                assert (opened.ready, opened.blocks, opened.state, opened.hidden) == (4, [100], None, None)
                second = asyncio.create_task(peers.open(hold, opened.ready))
                await asyncio.sleep(0.05)
                assert not second.done()
                loan.read(10)
                opened = await second
                assert (opened.ready, opened.first, opened.blocks, opened.state) == (10, 1, [101, 102], 7)
                assert await peers.close(hold, read=True)
                await lender.book.finish(lease)

    run(test())


def test_a_mac_is_of_one_secret_engine_lease_prompt_and_salt() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, _):
            lease, _ = await lender.read()
            good = lender.reference(lease)
            for prompt in (Prompt.of(IDS[:-1]), Prompt.of([*IDS[:-1], 99]), Prompt.of(IDS, "salt")):
                assert await refused(peers.meet(good, prompt)) == "bad_mac"
            for other in (
                {"lease": "0" * 32},
                {"engine": "0" * 32},
                {"mac": good.mac[:-1]},
                {"mac": "\udcff"},
            ):
                assert await refused(peers.meet(lender.reference(lease, **other), PROMPT)) == "bad_mac"
            assert peers.figures.handshakes == 0, "nothing was sent"
            await peers.meet(good, PROMPT)

    run(test())
