"""Both sides of the side channel: a prompt is lent, opened and closed, and all else is refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch

from specdec.errors import ConfigError, SpecdecError
from specdec.reach.allowed_peers import AllowedPeers, Endpoint
from specdec.reach.channel import Channel, channel_app
from specdec.reach.peer_client import PeerClient
from specdec.reach.peers import Peers
from specdec.reach.prefix_log import PrefixLogChanges
from specdec.reach.protocol import PrefixIdentity, ReachError, RoomReference, hash_facts
from tests.reach.peers import FACTS, IDS, PROMPT, Clock, Lender, reading, run, until

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def raw(serve: Serve) -> AsyncIterator[int]:
    """Listen, and wait at the end until all connections are closed."""
    tasks = set()
    server = await asyncio.start_server(
        lambda *own: tasks.add(asyncio.create_task(serve(*own))), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]
    await asyncio.gather(*tasks)


async def refused(awaitable) -> str:
    with pytest.raises(ReachError) as caught:
        await awaitable
    return caught.value.reason


def test_a_lease_is_opened_read_and_closed() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, attached):
            lease, loan = await lender.read()
            reference = lender.reference(lease)
            session = await peers.connect(reference, PROMPT)
            assert session.plan == f"plan of {lender.engine}" and attached.engines == [lender.engine]
            async with peers.hold(session, reference, PROMPT) as hold:
                opened = await peers.open(hold, 4)
                assert (opened.ready, opened.first, opened.blocks, opened.state) == (10, 1, [101, 102], 7)
                assert opened.is_whole and opened.hidden
                assert torch.equal(opened.hidden.tensor, torch.arange(3, dtype=torch.bfloat16))
                assert not loan.given_back
                assert await peers.close(hold, read=True)
            assert loan.given_back == 1
            assert await peers.connect(reference, PROMPT) is session, "one handshake serves all"
            assert peers.figures.handshakes == 1
            assert lender.book.figures.closed_intact == lender.book.figures.opened == 1

    run(test())


def test_a_room_lists_blocks_during_prefill() -> None:
    async def test() -> None:
        async with Lender(wait_s=5).listening() as lender, reading(lender.port) as (peers, _):
            reference = lender.room(2**63 - 1)
            session = await peers.connect(reference, PROMPT)
            async with peers.hold(session, reference, PROMPT) as hold:
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
            for prompt in (
                PrefixIdentity.of(IDS[:-1]),
                PrefixIdentity.of([*IDS[:-1], 99]),
                PrefixIdentity.of(IDS, "salt"),
            ):
                assert await refused(peers.connect(good, prompt)) == "bad_mac"
            for other in (
                {"lease": "0" * 32},
                {"engine": "0" * 32},
                {"mac": good.mac[:-1]},
                {"mac": "\udcff"},
            ):
                assert await refused(peers.connect(lender.reference(lease, **other), PROMPT)) == "bad_mac"
            assert peers.figures.handshakes == 0, "nothing was sent"
            await peers.connect(good, PROMPT)

    run(test())


def test_an_unwanted_prompt_is_released_at_once() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, _):
            lease, loan = await lender.read()
            reference = lender.reference(lease)
            session = await peers.connect(reference, PROMPT)
            with pytest.raises(ValueError, match="its client left"):
                async with peers.hold(session, reference, PROMPT):
                    raise ValueError("its client left")
            await until(lambda: loan.given_back == 1)
            assert lender.book.figures.closed_unread == 1 and peers.figures.held == 0

    run(test())


def test_heartbeats_renew_a_lease_and_report_its_end() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, _):
            held = [await lender.read() for _ in range(3)]
            references = [lender.reference(lease) for lease, _ in held]
            session = await peers.connect(references[0], PROMPT)
            async with (
                peers.hold(session, references[0], PROMPT) as first,
                peers.hold(session, references[1], PROMPT) as second,
            ):
                for _ in range(3):
                    lender.clock.now_s += 20
                    beats = peers.figures.beats
                    await until(lambda beats=beats: peers.figures.beats >= beats + 2)
                assert [loan.given_back for _, loan in held] == [0, 0, 1], "the third had none"
                held[1][1].lent.intact = False
                with pytest.raises(ReachError, match="over"):
                    await peers.open(second, 0)
                await second.lost.wait()
                assert not first.lost.is_set()
                assert (await peers.open(first, 0)).is_whole
            await until(lambda: held[0][1].given_back == 1)

    run(test())


def test_a_dead_peer_fails_waiting_fetches_fast() -> None:
    async def test() -> None:
        clock = Clock()
        async with Lender().listening() as lender, reading(lender.port, clock=clock) as (peers, attached):
            lease, _ = await lender.read()
            reference = lender.reference(lease)
            session = await peers.connect(reference, PROMPT)
            async with peers.hold(session, reference, PROMPT) as hold:
                await lender.channel.stop()
                await hold.lost.wait()
                assert not await peers.close(hold, read=True)
            await until(lambda: not attached.engines)
            assert peers.figures.up == 0
            for pause_s in (0.5, 1, 2, 4, 8, 16, 30, 30):
                handshakes = peers.figures.handshakes
                assert await refused(peers.connect(reference, PROMPT)) == "peer_down"
                clock.now_s += pause_s - 0.01
                for _ in range(20):
                    assert await refused(peers.connect(reference, PROMPT)) == "peer_down"
                assert peers.figures.handshakes == handshakes + 1, "the others were not tried"
                clock.now_s += 0.02
            async with Lender().listening(lender.port) as again:
                lease, _ = await again.read()
                session = await peers.connect(again.reference(lease), PROMPT)
                assert session.engine == again.engine and peers.figures.up == 1

    run(test())


def test_a_restarted_peer_gets_a_new_handshake_and_no_old_state() -> None:
    async def test() -> None:
        clock = Clock()
        async with Lender().listening() as old:
            port = old.port
            async with reading(port, clock=clock) as (peers, attached):
                lease, _ = await old.read()
                past = old.reference(lease)
                session = await peers.connect(past, PROMPT)
                async with peers.hold(session, past, PROMPT) as hold:
                    await old.channel.stop()
                    async with Lender().listening(port) as new:
                        with pytest.raises(ReachError):
                            await peers.open(hold, 0)
                        assert hold.lost.is_set()
                        clock.now_s += 40
                        lease, _ = await new.read()
                        assert await refused(peers.connect(past, PROMPT)) == "other_engine"
                        handshakes = peers.figures.handshakes
                        for _ in range(20):
                            assert await refused(peers.connect(past, PROMPT)) == "other_engine"
                        assert peers.figures.handshakes == handshakes, "no handshake for each"
                        session = await peers.connect(new.reference(lease), PROMPT)
                        assert session.engine == new.engine
                        await until(lambda: attached.engines == [new.engine])

    run(test())


def test_another_model_is_refused_by_name_once_and_for_a_while() -> None:
    async def test() -> None:
        clock = Clock()
        lender = Lender(facts=FACTS | {"dtype": "bfloat16"})
        async with lender.listening(), reading(lender.port, clock=clock) as (peers, attached):
            lease, _ = await lender.read()
            for _ in range(10):
                with pytest.raises(ReachError, match="dtype is bfloat16 there and float32 here") as caught:
                    await peers.connect(lender.reference(lease), PROMPT)
                assert caught.value.reason == "fingerprint"
            assert peers.figures.handshakes == 1 and peers.figures.refused_peers == 1 and not attached.engines
            lender.facts = dict(FACTS)
            clock.now_s += 60
            await peers.connect(lender.reference(lease), PROMPT)
            assert peers.figures.refused_peers == 0 and peers.figures.up == 1

    run(test())


def test_peers_that_cannot_attach_are_refused_and_lost_ones_reattached() -> None:
    async def test() -> None:
        clock = Clock()
        async with Lender().listening() as lender, reading(lender.port, clock=clock) as (peers, attached):
            lease, _ = await lender.read()
            reference = lender.reference(lease)
            attached.error = ConfigError("tp does not divide", field="tp")
            assert await refused(peers.connect(reference, PROMPT)) == "layout"
            clock.now_s += 60
            attached.error = SpecdecError("its agent does not answer")
            assert await refused(peers.connect(reference, PROMPT)) == "carrier"
            clock.now_s += 60
            attached.error = None
            session = await peers.connect(reference, PROMPT)
            peers.lost(session)
            again = await peers.connect(reference, PROMPT)
            assert again is not session and attached.engines == [lender.engine]
            peers.lost(session)
            assert await peers.connect(reference, PROMPT) is again, "it was of the pair before"
            peers.refuse(again, "its bytes came wrong")
            assert await refused(peers.connect(reference, PROMPT)) == "carrier"

    run(test())


def test_many_requests_that_meet_a_peer_at_once_shake_hands_once() -> None:
    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port) as (peers, _):
            lease, _ = await lender.read()
            meets = [peers.connect(lender.reference(lease), PROMPT) for _ in range(50)]
            assert len({id(session) for session in await asyncio.gather(*meets)}) == 1
            assert peers.figures.handshakes == 1

    run(test())


def test_a_router_may_query_cached_prefixes() -> None:
    async def test() -> None:
        lender = Lender(kept={(prefix, 7) for prefix in range(1000)})
        async with lender.listening():
            calls, at = PeerClient(lender.secret), Endpoint("127.0.0.1", lender.port)
            first = await calls.get(at, "/reach/kept?since=0", PrefixLogChanges)
            assert first.whole and len(first.added) == 1000 and first.epoch == lender.engine
            lender.kept = lender.kept | {(5000, 7)}
            lender.clock.now_s += 60
            then = await calls.get(at, f"/reach/kept?since={first.seq}", PrefixLogChanges)
            assert not then.whole and then.added == [(f"{5000:016x}", 7)] and not then.gone
            await calls.close()

    run(test())


def test_another_secret_decrypts_nothing_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with (
            Lender().listening() as lender,
            reading(lender.port, secret="another-secret-of-tests") as (peers, _),
        ):
            lease, _ = await lender.read()
            assert await refused(peers.connect(lender.reference(lease), PROMPT)) == "bad_mac"
            assert await refused(peers.connect(lender.room(5), PROMPT)) == "unauthorized"
            told = [record.message for record in caplog.records if record.levelname == "WARNING"]
            assert len(told) == 2 and all("SPECDEC_REACH_SECRET" in line for line in told)
            assert await refused(peers.connect(lender.reference(lease), PROMPT)) == "bad_mac"
            assert len([own for own in caplog.records if own.levelname == "WARNING"]) == 2, "once a minute"

    run(test())


@pytest.mark.parametrize("answer", [b"", b"{}", b"[" * 10_000, b"x" * (1 << 25), b'{"error": {}}', None])
@pytest.mark.parametrize("status", [200, 302, 404, 500])
def test_a_peer_that_answers_nonsense_is_no_peer(answer: bytes | None, status: int) -> None:
    """None: the response is not HTTP."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            writer.write(b"SSH-2.0-x\r\n")
        else:
            location = "Location: http://127.0.0.1:1/\r\nContent-Type: application/json\r\n"
            writer.write(f"HTTP/1.1 {status} X\r\n{location}Content-Length: {len(answer)}\r\n\r\n".encode())
            writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def test() -> None:
        async with raw(serve) as port, reading(port) as (peers, _):
            reason = await refused(peers.connect(RoomReference("127.0.0.1", port, 1), PROMPT))
            assert reason in ("garbled", "peer_down")

    run(test())


def test_a_peer_that_does_not_answer_is_left_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def test() -> None:
        async with raw(serve) as port, reading(port) as (peers, _):
            reason = await refused(peers.connect(RoomReference("127.0.0.1", port, 1), PROMPT))
            assert reason == "peer_slow"

    monkeypatch.setattr("specdec.reach.peers.MEET_S", 0.1)
    run(test())


def test_a_peer_leads_nowhere_else() -> None:
    """Redirects are not followed: requests go to allowed addresses only."""
    seen = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(1))
        writer.close()

    async def test() -> None:
        async with raw(elsewhere) as other:

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                location = f"Location: http://127.0.0.1:{other}/\r\nContent-Length: 0\r\n\r\n"
                writer.write(f"HTTP/1.1 307 X\r\n{location}".encode())
                await reader.read()
                writer.close()

            async with raw(serve) as port, reading(port) as (peers, _):
                reference = RoomReference("127.0.0.1", port, 1)
                assert await refused(peers.connect(reference, PROMPT)) == "garbled"
                assert (
                    await refused(peers.connect(RoomReference("127.0.0.1", other, 1), PROMPT))
                    == "not_allowed"
                )
            assert not seen

    run(test())


def test_an_impostors_answer_is_not_cached() -> None:
    """A cached refusal has no traceback, whose frames would refer to the response and its JSON."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n[[], []]")
        writer.close()

    async def test() -> None:
        async with raw(serve) as port, reading(port) as (peers, _):
            with pytest.raises(ReachError) as caught:
                await peers.connect(RoomReference("127.0.0.1", port, 1), PROMPT)
            assert caught.value.reason == "garbled" and caught.value.__traceback__, "the control"
            (link,) = peers._links.values()
            assert link.refusal and link.refusal.reason == "garbled" and not link.refusal.__traceback__

    run(test())


def test_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests for rooms may name any address of an allowed network."""

    async def test() -> None:
        async with Lender().listening() as lender, reading(lender.port, *range(1, 20)) as (peers, _):
            lease, _ = await lender.read()
            session = await peers.connect(lender.reference(lease), PROMPT)
            for port in range(1, 20):
                await refused(peers.connect(RoomReference("127.0.0.1", port, 1), PROMPT))
            assert len(peers._links) == 3 and peers._links[session.at].session is session

    monkeypatch.setattr("specdec.reach.peers.MOST_LINKS", 3)
    run(test())


def test_an_answer_without_an_end_is_not_read_to_it() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 X\r\n\r\n")
            while sent < 1 << 27:
                writer.write(bytes(1 << 16))
                await writer.drain()
                sent += 1 << 16
        writer.close()

    async def test() -> None:
        async with raw(serve) as port, reading(port) as (peers, _):
            assert await refused(peers.connect(RoomReference("127.0.0.1", port, 1), PROMPT)) == "garbled"
        assert sent < 1 << 26

    run(test())


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_listened_at_is_named(host: str) -> None:
    async def test() -> None:
        async with Lender().listening() as lender:
            other = Lender()
            side = Channel(other.book, channel_app(other.book, other.secret, agents=other.agents))
            with pytest.raises(ConfigError, match=f"reach_port: {host}:{lender.port} cannot be") as caught:
                await side.start(host, lender.port)
            assert caught.value.field == "reach_port"
            await side.stop()

    run(test())


def test_both_sides_speak_over_ipv6_too() -> None:
    async def test() -> None:
        lender = Lender()
        async with lender.listening(host="::1"):
            peers = Peers(
                lender.secret,
                AllowedPeers([f"[::1]:{lender.port}"], 5600),
                fingerprint=hash_facts(FACTS),
                facts=FACTS,
                attach=lambda name, agents: agents.engine,
                detach=lambda name: None,
            )
            lease, _ = await lender.read()
            session = await peers.connect(lender.reference(lease, host="0:0::1"), PROMPT)
            assert session.plan == lender.engine
            await peers.stop()

    run(test())


def test_a_stopping_server_ends_waiting_requests() -> None:
    async def test() -> None:
        lender = Lender(wait_s=30)
        async with lender.listening(), reading(lender.port) as (peers, _):
            lease, loan = lender.lend()
            reference = lender.reference(lease)
            session = await peers.connect(reference, PROMPT)
            async with peers.hold(session, reference, PROMPT) as hold:
                opening = asyncio.create_task(peers.open(hold, 0))
                await until(lambda: lease.reader is not None)
                await lender.channel.stop()
                assert await refused(opening) in ("lease_over", "peer_down")
                assert loan.given_back == 1

    run(test())
