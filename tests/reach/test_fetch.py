"""A fetch returns what one engine would have computed, or nothing; after any failure the text is the same."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.engine.incoming import IncomingPrefixes
from specdec.reach import fetch, peer_client
from specdec.reach.allowed_peers import AllowedPeers
from specdec.reach.connections import bounded
from specdec.reach.lease import TransferLease
from specdec.reach.lease_table import LeaseTable
from specdec.reach.messages import HiddenState, OpenRequest, OpenResponse
from specdec.reach.peers import LeaseHold, Peers
from specdec.reach.protocol import LeaseReference, ReachError, RoomReference
from tests.models.agreeing import END
from tests.reach.engines import HOST, Side, side
from tests.reach.peers import until

FIELDS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 224,
    "chunk_tokens": 24,
    "max_running": 4,
    "draft": "mtp",
    "adaptive": False,
    "num_steps": 3,
}
OTHER_HOST = "127.0.0.2"
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
MOST = 9
"""Blocks of the longest prompt here."""


def prompt(seed: int, length: int = 130) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(END) for _ in range(length)]


@asynccontextmanager
async def pair(folder: Path, **of_writer: Any) -> AsyncIterator[tuple[Side, Side]]:
    async with (
        side(folder, **FIELDS) as reader,
        side(folder, peer=reader, **{**FIELDS, **of_writer}) as writer,
    ):
        yield reader, writer
        await reader.settle()
        await writer.settle()


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def said(reader: Side, ids: list[int]) -> tuple[int, ...]:
    return await reader.say(ids, PARAMS)


async def likelihood(side: Side, ids: list[int]) -> float:
    """Return the log-probability of a prompt's first output token on that side."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
    (own,) = await asyncio.to_thread(side.engine.generate, [ids], params)
    assert own.logprobs
    return own.logprobs[0].logprob


@pytest.mark.parametrize("check", ["first", "always", "never"])
def test_a_fetched_prefix_equals_a_local_prefill(folder: Path, check: str) -> None:
    async def test() -> None:
        async with pair(folder, check=check) as (reader, writer):
            for seed in range(3):
                ids = prompt(seed)
                fetched = await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))
                assert (fetched.outcome, fetched.tokens) == ("fetched", 129)
                own = await asyncio.to_thread(writer.engine.generate, [ids], PARAMS)
                assert own[0].stats.cached_tokens == 129
                assert own[0].token_ids == await said(reader, ids)
            assert reader.book.figures.closed_intact == 3 and not reader.book.figures.held

    run(test())


def test_a_room_is_fetched_during_its_prefill(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            begun: list[int] = []
            read = writer.carrier.read

            def counting(peer: str, indices: Any, num_bytes: int, deadline_s: float) -> Any:
                begun.append(len(indices[0]))
                return read(peer, indices, num_bytes, deadline_s)

            writer.carrier.read = counting
            fetching = asyncio.create_task(
                writer.fetcher.fetch(ids, SOLE, RoomReference(HOST, reader.channel.port, 7))
            )
            await asyncio.sleep(0.1)
            slow_down(reader)
            await reader.lend(ids, room=7)
            assert (await fetching).outcome == "fetched"
            assert len(begun) > 2 and sum(begun) == MOST + 1, "in parts, each block once, and the state"
            assert await said(writer, ids) == await said(reader, ids)
            again = await writer.fetcher.fetch(prompt(2), SOLE, RoomReference(HOST, reader.channel.port, 7))
            assert again.outcome == "room_used"

    run(test())


@pytest.mark.parametrize("width", ["narrow", "wide"])
def test_a_hidden_state_that_the_head_cannot_read_is_refused(
    width: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer's invalid data must not end a request: it once failed a step of all requests."""
    open_response = TransferLease.open_response

    def lying(self: TransferLease, have: int) -> OpenResponse:
        opened = open_response(self, have)
        assert opened.hidden
        own = opened.hidden.tensor
        forged = own.repeat(3) if width == "wide" else own[:3]
        return opened.model_copy(update={"hidden": HiddenState.of(forged)})

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            lent = await reader.lend(ids)
            with monkeypatch.context() as patch:
                patch.setattr(TransferLease, "open_response", lying)
                assert (await writer.fetcher.fetch(ids, SOLE, lent)).outcome == "garbled"
            assert await said(writer, ids) == await said(reader, ids)
            assert not writer.engine.stats().failed_steps

    run(test())


def test_a_peer_that_answers_at_once_without_news_is_polled_slowly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a delay this used the whole event loop: 150 calls a second for each prompt."""
    asked = 0

    async def unknown(self: LeaseTable, room: int, ask: OpenRequest) -> OpenResponse:
        nonlocal asked
        asked += 1
        raise ReachError("unknown_room", "No.")

    async def nothing(self: LeaseTable, lease_id: str, ask: OpenRequest) -> OpenResponse:
        nonlocal asked
        asked += 1
        own = {"lease": lease_id, "length": ask.length, "ready": 0, "first": 0, "blocks": []}
        return OpenResponse(**own, state=None, hidden=None)

    async def test() -> None:
        async with pair(folder, limit_s=2.5) as (reader, writer):
            ids = prompt(1)
            for reference in (RoomReference(HOST, reader.channel.port, 7), await reader.lend(ids)):
                assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == "late"
            assert 2 <= asked <= 6

    monkeypatch.setattr(LeaseTable, "open_room", unknown)
    monkeypatch.setattr(LeaseTable, "open", nothing)
    run(test())


def test_rooms_that_never_appear_delay_no_leases(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_client, "MOST_OF_A_PEER", 3)
    monkeypatch.setattr(fetch, "MOST_ENTERING", 3)

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            rooms = [RoomReference(HOST, reader.channel.port, number) for number in range(4)]
            waiting = [asyncio.create_task(writer.fetcher.fetch(prompt(8), SOLE, room)) for room in rooms[:3]]
            await until(lambda: reader.book.figures.rooms_waiting == 3)
            ids = prompt(9)
            assert (await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))).outcome == "fetched"
            assert (await writer.fetcher.fetch(ids, SOLE, rooms[3])).outcome == "busy", "one caller's share"
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await until(lambda: not reader.book.figures.rooms_waiting)
            assert not writer.peers.figures.held and not writer.fetcher.entering

    run(test())


def test_prompts_that_are_declined_do_not_add_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_DECLINING", 2)

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            rooms = [RoomReference(HOST, reader.channel.port, number) for number in range(5)]
            declining = [asyncio.create_task(writer.fetcher.decline(prompt(8), SOLE, room)) for room in rooms]
            await asyncio.wait(declining[2:])
            assert not any(task.done() for task in declining[:2])
            for task in declining:
                task.cancel()
            await asyncio.gather(*declining, return_exceptions=True)
            lease = await reader.lend(prompt(9))
            await writer.fetcher.decline(prompt(9), SOLE, lease)
            await until(lambda: not reader.book.figures.held)

    run(test())


def test_an_engine_with_two_addresses_can_be_read_by_both(folder: Path) -> None:
    """Connecting to one address does not end reads through the other."""

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            port = reader.channel.port
            assert reader.channel._runner.server
            factory = bounded(reader.channel._runner.server)
            other = await asyncio.get_running_loop().create_server(factory, OTHER_HOST, port)
            writer.peers._allowed = AllowedPeers([HOST, OTHER_HOST], port)
            reader.carrier.stall()
            ids = prompt(1)
            first = asyncio.create_task(writer.fetcher.fetch(ids, SOLE, await reader.lend(ids)))
            while not reader.carrier.asked:
                await asyncio.sleep(0.01)
            ids = prompt(2)
            reference = await reader.lend(ids)
            assert isinstance(reference, LeaseReference)
            reference = dataclasses.replace(reference, host=OTHER_HOST)
            second = asyncio.create_task(writer.fetcher.fetch(ids, SOLE, reference))
            while writer.peers.figures.up < 2:
                await asyncio.sleep(0.01)
            reader.carrier.go_on()
            assert [(await own).outcome for own in (first, second)] == ["fetched"] * 2
            other.close()

    run(test())


def slow_down(side: Side) -> None:
    """Slow steps down, so that others observe each chunk."""
    import time

    loop = side.engine.model.loop
    loop.observers.append(lambda report: time.sleep(0.05))


def test_only_the_missing_part_is_fetched(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            await writer.say(ids[:50], SamplingParams(max_tokens=1))
            for room in (None, 3):
                ids = [*ids[:100], *prompt(room or 0, 80)]
                task = asyncio.create_task(reader.lend(ids, room=room))
                fetched = await writer.fetcher.fetch(ids, SOLE, await task)
                assert fetched.outcome == "fetched" and fetched.tokens < len(ids) - 40
                assert await said(writer, ids) == await said(reader, ids)

    run(test())


def test_a_short_or_cached_prompt_is_not_fetched(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            found = []
            for ids in (prompt(1, 40), prompt(2), prompt(2)):
                found.append((await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))).outcome)
            assert found == ["not_needed", "fetched", "not_needed"]

    run(test())


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"mac": "0" * 64}, "bad_mac"),
        ({"lease": "0" * 32}, "bad_mac"),
        ({"engine": "0" * 32}, "bad_mac"),
        ({"host": "192.0.2.1"}, "not_allowed"),
        ({"port": 1}, "not_allowed"),
    ],
)
def test_a_tampered_reference_fetches_nothing(folder: Path, change: dict[str, Any], outcome: str) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            reference = dataclasses.replace(await reader.lend(ids), **change)
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == outcome
            reader.take_back()
            assert await said(writer, ids) == await said(reader, ids)

    run(test())


def test_a_reference_is_good_for_its_prompt_and_salt_and_once(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids, other = prompt(1), prompt(2)
            reference = await reader.lend(ids)
            assert (await writer.fetcher.fetch(other, SOLE, reference)).outcome == "bad_mac"
            assert (await writer.fetcher.fetch(ids, Tenant(salt="s"), reference)).outcome == "bad_mac"
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == "fetched"
            await asyncio.to_thread(writer.engine.flush)
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome in (
                "unknown_lease",
                "lease_over",
                "room_used",
            )
            room = await reader.lend(ids, room=5)
            assert (await writer.fetcher.fetch(other, SOLE, room)).outcome == "other_prompt"
            for own in (ids, other):
                assert await said(writer, own) == await said(reader, own)
            reader.take_back()

    run(test())


def test_a_revoked_prefix_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease ends during the read, and another request gets its memory: `close` reports that."""

    async def test() -> None:
        async with pair(folder, check="never") as (reader, writer):
            ids = prompt(1)
            reference = await reader.lend(ids)
            close = writer.peers.close

            async def late(hold: Any, *, read: bool) -> bool:
                reader.take_back()
                return await close(hold, read=read)

            monkeypatch.setattr(writer.peers, "close", late)
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == "not_intact"
            assert await said(writer, ids) == await said(reader, ids)

    run(test())


def test_skipping_the_close_check_changes_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease ends, its memory is overwritten, and the bytes read are used without the check."""

    async def test() -> None:
        async with pair(folder, check="never") as (reader, writer):
            read = writer.carrier.read

            def spoilt(*asked: Any) -> Any:
                (lease,) = reader.book._leases.values()
                lent, arena = lease.loan.lent, reader.engine.transfers.arena
                reader.take_back()
                reader.engine.flush()
                for bytes_X in (arena.state_bytes_X(lent.state), *map(arena.block_bytes_X, lent.blocks)):
                    bytes_X.zero_()
                return read(*asked)

            async def unasked(hold: LeaseHold[Any], *, read: bool) -> bool:
                hold.is_closed = True
                return True

            writer.carrier.read = spoilt
            monkeypatch.setattr(writer.peers, "close", unasked)
            monkeypatch.setattr(IncomingPrefixes, "_is_worth", lambda *_: True)
            texts = []
            for ids in map(prompt, range(8)):
                assert (await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))).outcome == "fetched"
                texts.append((await likelihood(writer, ids), await likelihood(reader, ids)))
            assert all(abs(own - right) > 1e-6 for own, right in texts)

    run(test())


def test_a_peer_that_stalls_costs_a_deadline_and_its_late_bytes_land_nowhere(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            reference = await reader.lend(ids)
            reader.carrier.stall()
            fetched = await writer.fetcher.fetch(ids, SOLE, reference)
            assert fetched.outcome == "read_lost"
            assert writer.carrier.figures.quarantined > 0
            connector = writer.engine.model.loop.scheduler.connector
            assert connector.is_receiving, "memory that may still be written to was reused"
            want = await said(reader, ids)
            assert await said(writer, ids) == want
            reader.carrier.go_on()
            for _ in range(200):
                await asyncio.sleep(0.01)
                if not connector.is_receiving:
                    break
            assert await said(writer, ids) == want

    run(test())


def test_freeing_abandoned_memory_is_detected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with side(folder, **FIELDS) as reader, side(folder, peer=reader, **FIELDS) as writer:
            ids = prompt(1)
            reference = await reader.lend(ids)
            reader.carrier.stall()
            monkeypatch.setattr(writer.fetcher, "_drop_after", lambda found, _: writer.fetcher._drop(found))
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == "read_lost"
            arena = writer.engine.transfers.arena
            await asyncio.to_thread(writer.engine.flush)
            owner = "whoever is next"
            taken = arena.take_blocks(owner, 40)
            assert taken
            for block in taken:
                arena.block_bytes_X(block).fill_(7)
            reader.carrier.go_on()
            await asyncio.sleep(0.5)
            assert not all(bool((arena.block_bytes_X(block) == 7).all()) for block in taken)
            arena.release_owner(owner)

    run(test())


def test_a_dead_peer_costs_little_and_returns_as_a_new_one(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            assert (
                await writer.fetcher.fetch(prompt(9), SOLE, await reader.lend(prompt(9)))
            ).outcome == "fetched"
            reference = await reader.lend(ids)
            reader.carrier.die()
            assert (await writer.fetcher.fetch(ids, SOLE, reference)).outcome == "read_lost"
            assert await said(writer, ids) == await said(reader, ids)
            port = reader.channel.port
            await reader.channel.stop()
            fetched = await writer.fetcher.fetch(prompt(3), SOLE, RoomReference(HOST, port, 1))
            assert fetched.outcome == "peer_down"

    run(test())


def test_a_client_that_leaves_gives_everything_back(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            for moment in (0.0, 0.005, 0.02, 0.05):
                reader.carrier.stall()
                reference = await reader.lend(ids)
                fetching = asyncio.create_task(writer.fetcher.fetch(ids, SOLE, reference))
                if moment:
                    await until(lambda: writer.peers.figures.held == 1)
                await asyncio.sleep(moment)
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
                reader.carrier.go_on()
                if moment == 0.0:
                    reader.take_back()  # it has not been contacted yet
            assert writer.fetcher.figures.under_way == 0
            assert await said(writer, ids) == await said(reader, ids)

    run(test())


def test_corrupted_bytes_are_detected_at_the_first_transfer(folder: Path) -> None:
    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            sums = writer.engine.transfers.sums

            def altered(blocks: Any, state: Any) -> list[int]:
                writer.engine.transfers.arena.block_bytes_X(blocks[0])[3] ^= 1
                return sums(blocks, state)

            writer.engine.transfers.sums = altered  # type: ignore[method-assign]
            assert (await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))).outcome == "wrong_bytes"
            assert await said(writer, ids) == await said(reader, ids)
            refused = await writer.fetcher.fetch(prompt(2), SOLE, await reader.lend(prompt(2)))
            assert refused.outcome == "carrier"
            reader.take_back()

    run(test())


def test_a_peer_of_another_model_is_refused_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with pair(folder, facts={"model": "another"}) as (reader, writer):
            ids = prompt(1)
            assert (await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))).outcome == "fingerprint"
            assert "model" in caplog.text
            assert writer.peers.figures.refused_peers == 1
            reader.take_back()

    run(test())


def test_without_memory_a_fetch_waits_and_then_the_prompt_is_prefilled(folder: Path) -> None:
    async def test() -> None:
        async with side(folder, **FIELDS) as reader:
            layout = reader.engine.transfers.arena.layout
            memory = layout.slab_bytes * (2 + 1 + -(-16 // layout.blocks_per_slab))
            async with side(folder, peer=reader, limit_s=1.0, **{**FIELDS, "memory_bytes": memory}) as writer:
                ids = prompt(1)
                held = writer.engine.transfers.begin_landing(prompt(8)[:-1], SOLE).result(10)
                other = writer.engine.transfers.begin_landing(prompt(9)[:-1], SOLE)
                fetched = await writer.fetcher.fetch(ids, SOLE, await reader.lend(ids))
                assert fetched.outcome == "late"
                assert other.cancel() and held
                writer.engine.transfers.drop(held).result(10)
                assert await said(writer, ids) == await said(reader, ids)

    run(test())


def test_many_at_once_from_two_sides(folder: Path) -> None:
    """Each side prefills for the other and fetches from it, as in the second turn of a conversation."""

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            prompts = [prompt(seed, 70 + 7 * seed) for seed in range(12)]

            async def one(ids: list[int], room: int) -> tuple[str, tuple[int, ...]]:
                where = RoomReference(HOST, reader.channel.port, room)
                lending = asyncio.create_task(reader.lend(ids, room=room))
                fetched = await writer.fetcher.fetch(ids, SOLE, where)
                await lending
                return fetched.outcome, await said(writer, ids)

            found = await asyncio.gather(*(one(ids, room) for room, ids in enumerate(prompts)))
            assert {outcome for outcome, _ in found} <= {"fetched", "not_needed"}
            for ids, (_, text) in zip(prompts, found, strict=True):
                assert text == await said(reader, ids)

    run(test())


def test_a_complete_answer_is_used_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without new blocks: all of them may be cached here, but no state."""
    slept, opening = list[float](), Peers.open

    async def sleep(time_s: float) -> None:
        slept.append(time_s)

    async def test() -> None:
        async with pair(folder) as (reader, writer):
            ids = prompt(1)
            lent = await reader.lend(ids)
            monkeypatch.setattr(Peers, "open", lambda peers, hold, _: opening(peers, hold, len(ids) - 1))
            await writer.fetcher.fetch(ids, SOLE, lent)

    monkeypatch.setattr("specdec.reach.peers._sleep_until", sleep)
    run(test())
    assert not slept
