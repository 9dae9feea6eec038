"""A router and stand-in replicas in one event loop, with faults on demand."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDictProxy

from specdec.route.addresses import Address, given_addresses
from specdec.route.run import Router, routing
from specdec.route.settings import RouteConfig
from specdec.server.listen import bind

SOON_S = 20.0
"""Timeout for expected events: long enough for a machine under load."""


@dataclass
class Seen:
    """A request as a replica has received it."""

    method: str
    path: str
    headers: CIMultiDictProxy[str]
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the request is cancelled because its sender has disconnected."""


Answering = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


async def ok(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response({"ok": True})


def refusing(status: int, **headers: str) -> Answering:
    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": f"refused with {status}"}}, status=status, headers=headers
        )

    return answer


async def reset(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Reset the connection, as a killed process does."""
    assert request.transport
    request.transport.abort()
    await asyncio.sleep(SOON_S)
    raise AssertionError


async def never(request: web.Request, seen: Seen) -> web.StreamResponse:
    """Send nothing until the other side disconnects."""
    try:
        await asyncio.sleep(10 * SOON_S)
    except asyncio.CancelledError:
        seen.left.set()
        raise
    raise AssertionError


def streaming(*events: bytes, pause_s: float = 0.0, then: Answering | None = None) -> Answering:
    """Return a handler that sends events, one per write, and then ends or runs `then`."""

    async def answer(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(pause_s)
        if then:
            await then(request, seen)
        await response.write_eof()
        return response

    return answer


class Fake:
    """A stand-in for a replica."""

    def __init__(self, answer: Answering = ok, *, models: Sequence[str] = ("tiny",)) -> None:
        self.answer, self.is_ready = answer, True
        self.arena, self.waiting, self.models, self.role = 0.0, 0, models, ""
        self.seen: list[Seen] = []
        self.checks = 0

    async def __aenter__(self) -> "Fake":
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        self.checks += 1
        return web.json_response({}, status=200 if self.is_ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [
            f'vllm:num_requests_waiting{{model_name="{name}",engine="0"}} {self.waiting}'
            for name in self.models
        ]
        lines += [
            f'vllm:kv_cache_usage_perc{{model_name="{name}",engine="0"}} {self.arena}' for name in self.models
        ]
        if self.role:
            lines.append(f'specdec:reach_role{{engine="0",model_name="tiny",role="{self.role}"}} 1.0')
        return web.Response(text="\n".join(["# HELP x", *lines, ""]))

    async def _any(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.method, request.raw_path, request.headers, await request.read())
        self.seen.append(seen)
        return await self.answer(request, seen)


class Rig:
    """A router, its replicas, and a client."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router, self.client = router, client

    @property
    def replicas(self) -> list[Any]:
        return self.router.state.fleet.replicas

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """Send JSON; return the status and the parsed response."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(path, json=body, headers=named) as answer:
            return answer.status, await answer.json()

    def prefer(self, fake: Fake) -> None:
        """Make the router choose this replica first: all others seem to have long prefills pending."""
        for each in self.replicas:
            each.reading += 0 if each.url == fake.url else 1 << 40

    async def figure(self, name: str, **labels: str) -> float:
        """Read one of the router's metrics."""
        async with self.client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{inside}}}" if labels else name
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.rsplit(" ", 1)[0] == wanted)


async def until(is_so: Callable[[], bool]) -> None:
    """Poll until a condition is true."""
    async with asyncio.timeout(SOON_S):
        while not is_so():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def rig(
    *plain: Fake, prefill: Sequence[Fake] = (), decode: Sequence[Fake] = (), gone: int = 0, **settings: Any
) -> AsyncIterator[Rig]:
    """Route to stand-ins, and to some addresses that are up for the router but refuse connections."""
    fakes = [*plain, *prefill, *decode]
    async with contextlib.AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        lists = {"replicas": plain, "prefill": prefill, "decode": decode}
        urls = {name: [own.url for own in each] for name, each in lists.items() if each}
        closed = [_closed_port() for _ in range(gone)]
        if closed:
            urls["replicas"] = [*(f"http://127.0.0.1:{port}" for port in closed), *urls.get("replicas", [])]
        settings = {"check_period": 0.02, "port": 0, **urls, **settings}
        config = RouteConfig(**settings)
        addresses: list[Address] = given_addresses(config)
        sock = stack.enter_context(bind(config.host, config.port))
        router = await stack.enter_async_context(routing(config, addresses, sock, None))
        client = await stack.enter_async_context(aiohttp.ClientSession(router.url))
        own = Rig(router, client)
        urls_of_fakes = {fake.url for fake in fakes if fake.is_ready}
        await until(lambda: all(each.is_up for each in own.replicas if each.url in urls_of_fakes))
        yield own


def _closed_port() -> int:
    """Return a port at which nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
