"""Many simultaneous requests of one caller delay neither streams nor other callers' requests."""

import asyncio
import re
import signal
import socket
from contextlib import ExitStack
from selectors import EVENT_READ, DefaultSelector

import pytest

from specdec.server.access import Access
from specdec.server.listen import bind, listen
from specdec.server.settings import ServerConfig
from specdec.server.turns import MOST, Turns
from tests.selection import EXHAUSTIVE
from tests.server.live import Live

MANY = 60


def test_few_requests_start_per_iteration_and_callers_take_turns() -> None:
    async def main() -> None:
        turns, order, rounds = Turns(), list[str](), list[int]()
        loop, number, asked = asyncio.get_running_loop(), 0, list[asyncio.Task[None]]()

        def count() -> None:
            nonlocal number
            number += 1
            if any(not task.done() for task in asked):
                loop.call_soon(count)

        async def begin(caller: str) -> None:
            await turns.wait(caller)
            order.append(caller)
            rounds.append(number)

        asked += [asyncio.create_task(begin(caller)) for caller in "aaaaaaaaaaabbc"]
        loop.call_soon(count)
        await asyncio.sleep(0)
        asked[5].cancel()  # its client has disconnected
        await asyncio.gather(*asked, return_exceptions=True)
        assert order == list("aaaaabcbaaaaa") and max(map(rounds.count, rounds)) == MOST
        await asyncio.wait_for(begin("d"), 60)  # nothing is left of it

    asyncio.run(main())


def test_with_a_single_caller_no_request_waits() -> None:
    async def main() -> None:
        turns = Turns(alone=True)
        asked = [asyncio.create_task(turns.wait("alice")) for _ in range(3 * MOST)]
        refused = [asyncio.create_task(turns.wait("")) for _ in range(3 * MOST)]
        await asyncio.sleep(0)
        assert all(task.done() for task in asked) and not all(task.done() for task in refused)
        await asyncio.gather(*refused)

    asyncio.run(main())
    keys = ["alice", "bob"]
    assert Access(ServerConfig()).is_for_one and Access(ServerConfig(api_key=keys[:1])).is_for_one
    assert not Access(ServerConfig(api_key=keys)).is_for_one
    assert Access(ServerConfig(host="0.0.0.0", api_key=keys[:1])).is_for_one
    assert not Access(ServerConfig(host="0.0.0.0")).is_for_one


def test_a_new_connection_does_not_wait_for_an_iteration_of_each_before_it() -> None:
    async def main() -> None:
        rounds, accepted, count = 0, 0, 64

        def accept() -> asyncio.Protocol:
            nonlocal accepted
            accepted += 1
            return asyncio.Protocol()

        with ExitStack() as open_ones:
            sock = open_ones.enter_context(bind("127.0.0.1", 0))
            listener, _ = await listen(accept, sock, None)
            for _ in range(count):
                open_ones.enter_context(socket.create_connection(sock.getsockname()))
            while accepted < count:
                await asyncio.sleep(0)
                rounds += 1
            listener.close()
        assert rounds < count / 4

    asyncio.run(main())


@EXHAUSTIVE
@pytest.mark.parametrize("key", ["alice", "nobody"])
def test_many_requests_of_one_caller_come_after_one_of_another(key: str) -> None:
    """Alice, or a client without a valid key, sends many at once and Bob one behind them."""
    with Live("--api-key", "alice", "--api-key", "bob") as live, ExitStack() as open_ones:
        host, port = re.findall(r"//(.*):(\d+)", live.url)[0]
        keys = [*[key] * MANY, "bob"]
        clients = [open_ones.enter_context(socket.create_connection((host, int(port)))) for _ in keys]
        assert live.ask("/health").status == 200  # all connections are accepted before
        live.process.send_signal(signal.SIGSTOP)
        try:
            for client, own in zip(clients, keys, strict=True):
                client.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nx-api-key: {own}\r\n\r\n".encode())
        finally:
            live.process.send_signal(signal.SIGCONT)
        selector, came = open_ones.enter_context(DefaultSelector()), 0
        for client in clients:
            selector.register(client, EVENT_READ)
        while clients[-1] not in (ready := [own.fileobj for own, _ in selector.select(60)]):
            assert ready
            came += len(ready)
            for answered in ready:
                selector.unregister(answered)
        assert came < MANY / 2
