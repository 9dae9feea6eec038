"""Slow work runs beside the event loop, in few threads and with a bounded queue."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from specdec import EngineConfig
from specdec.models.folder import SHIPPED
from specdec.server import threads
from specdec.server.app import build_app
from specdec.server.bodies import ChatBody, RequestBody
from specdec.server.dialects import Dialect
from specdec.server.failures import Failure
from specdec.server.messages import ChatMessage
from specdec.server.settings import ServerConfig
from specdec.server.shares import open_models
from specdec.server.state import LARGE, LONG, ServerState
from specdec.server.switcher import Switcher
from specdec.server.threads import COUNT, ThreadPool

CONFIG = EngineConfig(draft="none", memory_bytes=24 << 20, max_running=4, max_model_len=512)
TURNS = [{"role": role, "content": "ab" * 20} for role in ("user", "assistant") * 60] + [
    {"role": "user", "content": "a"}
]


def test_a_pool_has_few_threads_and_refuses_what_does_not_fit() -> None:
    pool, ends, begun, done = ThreadPool("test", 3), threading.Event(), list[int](), list[int]()

    def work(number: int) -> Callable[[], int]:
        def wait() -> int:
            begun.append(number)
            assert ends.wait(60)
            done.append(number)
            return number

        return wait

    async def main() -> None:
        asked = [asyncio.create_task(pool.do(work(number))) for number in range(COUNT + 3)]
        while waiting(pool) < 3 or len(begun) < COUNT:
            await asyncio.sleep(0.001)
        assert sum(thread.name == "specdec-test" for thread in threading.enumerate()) == COUNT
        with pytest.raises(Failure, match="waiting to be parsed") as refused:
            await pool.do(work(-1))
        assert refused.value.status == 503 and refused.value.headers == {"Retry-After": "1"}
        gone = asked[COUNT + 1], asked[0]  # one waits, the other has started
        for task in gone:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert waiting(pool) == 2, "what a client took along leaves its place to others"
        asked.append(asyncio.create_task(pool.do(work(9))))
        await asyncio.sleep(0)
        ends.set()
        left = [task for task in asked if task not in gone]
        assert await asyncio.gather(*left) == [*range(1, COUNT + 1), COUNT + 2, 9]
        assert COUNT + 1 not in done
        with pytest.raises(ZeroDivisionError):
            await pool.do(lambda: 1 // 0)
        assert await pool.do(lambda: 7) == 7

    asyncio.run(main())
    for thread in threading.enumerate():
        if thread.name == "specdec-test":
            thread.join(60)
            assert not thread.is_alive(), "none stays that has nothing to do"


def test_a_caller_rests_after_long_work_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=0.0, used_s=0.0)
    own = SimpleNamespace(monotonic=lambda: clock.now_s, thread_time=lambda: clock.used_s)
    monkeypatch.setattr(threads, "time", own)

    def work_long() -> None:
        clock.used_s += 10.0

    async def main() -> None:
        pool = ThreadPool("test", 8, pauses=True)
        await pool.do(work_long, "alice")
        rests = asyncio.create_task(pool.do(lambda: 1, "alice"))
        assert await pool.do(lambda: 2, "bob") == 2
        assert await pool.do(lambda: 3, "bob") == 3, "short work is followed by no rest"
        assert not rests.done()
        clock.now_s += 31.0
        assert await pool.do(lambda: 4, "bob") == 4  # which wakes a thread
        assert await rests == 1
        easy = ThreadPool("test", 8)
        await easy.do(work_long, "alice")
        assert await easy.do(lambda: 5, "alice") == 5

    asyncio.run(main())


async def order(pool: ThreadPool, do: Callable[[Callable[[], Any], str], Awaitable[Any]]) -> list[str]:
    """Return the order in which work is done if alice has much queued before bob asks."""
    ends, done, begun = threading.Event(), list[str](), list[int]()

    def hold() -> None:
        begun.append(1)
        assert ends.wait(60)

    held = [asyncio.create_task(do(hold, "alice")) for _ in range(COUNT)]  # type: ignore[arg-type]
    while len(begun) < COUNT:  # a thread that is late would take one of Bob's first
        await asyncio.sleep(0.001)
    asked = ["alice"] * 9 + ["bob"] * 2
    tasks = [asyncio.create_task(do(lambda own=own: done.append(own), own)) for own in asked]  # type: ignore[arg-type, misc]
    while waiting(pool) < len(asked):
        await asyncio.sleep(0.001)
    ends.set()
    await asyncio.gather(*held, *tasks)
    assert sorted(done) == sorted(asked)
    return done


def test_callers_of_a_pool_take_turns() -> None:
    pool = ThreadPool("turns", 40)
    assert "bob" not in asyncio.run(order(pool, pool.do))[6:]
    assert "bob" in asyncio.run(order(pool, lambda work, _: pool.do(work, "anyone")))[6:]


def test_long_texts_of_callers_take_turns(switcher: Switcher) -> None:
    async def main(size: int) -> list[str]:
        served = ServerState(switcher, ServerConfig()).served[0]
        return await order(served._workers, lambda work, caller: served.work(size, work, caller))

    assert "bob" not in asyncio.run(main(LONG + 1))[6:]


def waiting(pool: ThreadPool) -> int:
    return sum(map(len, pool._waiting.values()))


@pytest.fixture(scope="module")
def switcher() -> Iterator[Switcher]:
    own = open_models([SHIPPED["tiny"]], CONFIG, ServerConfig())
    try:
        own.start()
        yield own
    finally:
        own.close()


@asynccontextmanager
async def serving(switcher: Switcher, state: ServerState | None = None) -> Any:
    runner = web.AppRunner(build_app(state or ServerState(switcher, ServerConfig())))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
            yield session
    finally:
        await runner.cleanup()


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/tokenize", "messages"),
    ],
)
def test_long_chats_are_parsed_and_converted_in_threads(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Parsing the body, building the chat and its parameters, and converting messages for the template."""
    seen: list[tuple[str, threading.Thread]] = []

    def watch(owner: type, name: str) -> None:
        right = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            seen.append((name, threading.current_thread()))
            return right(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(ChatMessage, "plain")
    watch(RequestBody, "params")
    watch(Dialect, "as_chat")
    watch(ChatBody, "offer")

    def noted(data: Any, **named: Any) -> Any:
        seen.append(("parse", threading.current_thread()))
        return json.loads(data, **named)

    monkeypatch.setattr("specdec.server.fields.parse", noted)
    own: dict[str, Any] = {} if path in ("/tokenize", "/v1/messages/count_tokens") else {"stream": False}
    own |= {"max_output_tokens": 1} if field == "input" else {"max_tokens": 1} if own else {}

    async def main() -> None:
        async with serving(switcher) as session:
            for turns in (TURNS[:1], TURNS):
                seen.clear()
                data = json.dumps({field: turns, **own}).encode()
                async with session.post(path, data=data) as answer:
                    said = await answer.text()
                assert answer.status in (200, 400), said  # some are too long by then
                beside = {name for name, thread in seen if thread is not threading.main_thread()}
                names = {name for name, _ in seen}
                assert {"parse", "plain"} <= names
                assert beside == (names if len(data) > LARGE else {"plain"})

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore:It is recommended to use web.RequestKey")
def test_large_bodies_waiting_to_be_parsed_are_refused_on_shutdown(
    switcher: Switcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def held(data: bytes) -> Any:
        assert ends.wait(60)
        return json.loads(data)

    monkeypatch.setattr("specdec.server.fields.parse", held)
    data = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * LARGE}).encode()

    async def main() -> None:
        state = ServerState(switcher, ServerConfig())
        async with serving(switcher, state) as session:

            async def ask() -> tuple[int, Any]:
                async with session.post("/v1/completions", data=data) as answer:
                    return answer.status, await answer.json()

            asked = [asyncio.create_task(ask()) for _ in range(COUNT + 2)]
            while state._readers._held < COUNT + 2:
                await asyncio.sleep(0.001)
            state.drain()
            for status, said in [*await asyncio.gather(*asked), await ask()]:
                assert (status, said["error"]["code"]) == (503, "stopping")
            ends.set()

    try:
        asyncio.run(main())
    finally:
        ends.set()
