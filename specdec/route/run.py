"""Listen, watch the replicas, and shut down gracefully."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from aiohttp import web

from specdec.http.connection import LINGER_S
from specdec.ray.upstream import Upstream
from specdec.route.addresses import Address
from specdec.route.app import build_app
from specdec.route.settings import RouteConfig
from specdec.route.state import State
from specdec.route.watch import Watch, open_session
from specdec.server.listen import SWITCH_S, bind, listen, say
from specdec.server.supervisor import READY, STOPPING, tell_supervisor
from specdec.server.tls import tls_context

logger = logging.getLogger(__name__)


def run(config: RouteConfig, addresses: Sequence[Address]) -> None:
    """Route requests until stopped."""
    tls = tls_context(config)
    sys.setswitchinterval(SWITCH_S)
    with bind(config.host, config.port) as sock:
        asyncio.run(serve(config, addresses, sock, tls))
    logger.info("stopped")


async def serve(
    config: RouteConfig, addresses: Sequence[Address], sock: socket.socket, tls: ssl.SSLContext | None
) -> None:
    """Serve until SIGTERM or SIGINT; then refuse new requests and drain those under way.

    A second signal stops without waiting, and so does a failure of what watches the replicas, as an error.
    """
    told, hurried, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        (hurried if told.is_set() else told).set()

    def fail(_: object) -> None:
        told.set()
        hurried.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    async with routing(config, addresses, sock, tls) as router:
        router.watching.add_done_callback(fail)
        count = "1 replica" if len(addresses) == 1 else f"{len(addresses)} replicas"
        replicas = f"the replicas of {config.replicas_dns}" if config.replicas_dns else count
        say(
            f"routing at {router.url}/v1 to {replicas} (health: {router.url}/health, "
            f"metrics: {router.url}/metrics); Ctrl-C stops it"
        )
        tell_supervisor(READY)
        await told.wait()
        tell_supervisor(STOPPING)
        await drain(router.state, hurried)
        for number in (signal.SIGTERM, signal.SIGINT):
            # What is left is bounded: one more signal is to change nothing.
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        if router.watching.done():
            router.watching.result()


class Router(NamedTuple):
    """A router that listens."""

    state: State
    url: str
    watching: "asyncio.Task[None]"


@contextlib.asynccontextmanager
async def routing(
    config: RouteConfig, addresses: Sequence[Address], sock: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[Router]:
    """Listen at a socket that is bound, and watch the replicas, until this is left."""
    async with (
        open_session(config) as session,
        Upstream(config.connect_timeout, config.answer_timeout) as upstream,
    ):
        state = State(config, addresses, upstream)
        runner = web.AppRunner(build_app(state), handler_cancellation=True, shutdown_timeout=LINGER_S)
        await runner.setup()
        assert runner.server
        listener, url = await listen(state.connections.factory(runner.server), sock, tls)
        watching = asyncio.create_task(Watch(state, session).run())
        try:
            yield Router(state, url, watching)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            listener.close()
            await runner.cleanup()


async def drain(state: State, hurried: asyncio.Event) -> None:
    """Wait for requests under way within the limit; then cut them off."""
    state.draining = True
    seconds, start_s = state.config.drain_seconds, time.monotonic()
    if state.tasks:
        logger.info("stopping: %g s for %d requests; a second signal ends at once", seconds, len(state.tasks))
    waits = [asyncio.create_task(event.wait()) for event in (state.idle, hurried)]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if state.tasks:
        took_s = time.monotonic() - start_s
        logger.warning("stopping with %d requests in flight after %.1f s", len(state.tasks), took_s)
        for task in list(state.tasks):
            task.cancel()
