"""The side channel: a small HTTP server for engines that fetch from this one.

Anyone with the secret can read all prompts this engine holds; unsigned requests are refused.
"""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

from aiohttp import web

from specdec.errors import ConfigError, SpecdecError
from specdec.http.connection import SERVER
from specdec.reach.connections import bounded
from specdec.reach.lease_table import LeaseTable
from specdec.reach.messages import (
    AgentsResponse,
    ChecksumRequest,
    ChecksumResponse,
    CloseRequest,
    CloseResponse,
    HeartbeatRequest,
    OpenRequest,
    write_refusal,
)
from specdec.reach.prefix_log import CachedPrefixLog
from specdec.reach.protocol import MOST_ROOM, ReachError, Reason, Secret
from specdec.reach.signed import SCHEME, ReplayGuard, SignedRequest

logger = logging.getLogger(__name__)

MOST_BODY_BYTES = 1 << 18
"""Enough for a beat of the maximum number of leases."""
BODY_S, SEND_S = 5.0, 20.0
"""Seconds a peer may take to send a body, and to receive an answer."""
STOP_S = 2.0
LEASE_ID = re.compile(r"[0-9a-f]{32}")
NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)

Handler = Callable[[web.Request, bytes], Awaitable[bytes]]


class Routes:
    """Routes of the side channel. Owned by the event loop's thread."""

    def __init__(
        self, leases: LeaseTable, agents: Callable[[], AgentsResponse], prefix_log: CachedPrefixLog | None
    ) -> None:
        self._leases, self._agents, self._prefix_log = leases, agents, prefix_log

    async def agents(self, request: web.Request, body: bytes) -> bytes:
        """Return how to reach the arenas; queried each time, since agents may be recreated."""
        return self._agents().write()

    async def open(self, request: web.Request, body: bytes) -> bytes:
        return (await self._leases.open(_lease_id(request), OpenRequest.from_json(body))).write()

    async def close(self, request: web.Request, body: bytes) -> bytes:
        return CloseResponse(
            intact=self._leases.close(_lease_id(request), CloseRequest.from_json(body))
        ).write()

    async def sums(self, request: web.Request, body: bytes) -> bytes:
        sums = await self._leases.sums(_lease_id(request), ChecksumRequest.from_json(body))
        return ChecksumResponse(sums=sums).write()

    async def room(self, request: web.Request, body: bytes) -> bytes:
        text = request.match_info["room"]
        if not NUMBER.fullmatch(text) or int(text) > MOST_ROOM:
            raise ReachError("malformed", f"The room in the path must be a number from 0 to {MOST_ROOM}.")
        return (await self._leases.open_room(int(text), OpenRequest.from_json(body))).write()

    async def beat(self, request: web.Request, body: bytes) -> bytes:
        return self._leases.beat(HeartbeatRequest.from_json(body)).write()

    async def cached_prefixes(self, request: web.Request, body: bytes) -> bytes:
        if self._prefix_log is None:
            raise ReachError("no_route", "This server does not publish its cached prefixes.")
        since = request.query.get("since", "0")
        if not NUMBER.fullmatch(since) or set(request.query) > {"since"}:
            raise ReachError("malformed", "since: give the seq of the last answer, or 0.", field="since")
        return (await self._prefix_log.since(int(since))).write()


def channel_app(
    leases: LeaseTable,
    secret: Secret,
    *,
    agents: Callable[[], AgentsResponse],
    prefix_log: CachedPrefixLog | None = None,
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """Build the application. A request's body is read only after its signature is verified."""
    guard = _guard(leases, secret, ReplayGuard(clock))
    app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[guard])
    app.on_response_prepare.append(_name_server)
    routes = Routes(leases, agents, prefix_log)
    for method, path, handler in (
        ("GET", "/reach/agents", routes.agents),
        ("POST", "/reach/leases/{lease}/open", routes.open),
        ("POST", "/reach/leases/{lease}/close", routes.close),
        ("POST", "/reach/leases/{lease}/sums", routes.sums),
        ("POST", "/reach/rooms/{room}", routes.room),
        ("POST", "/reach/beat", routes.beat),
        ("GET", "/reach/kept", routes.cached_prefixes),
    ):
        app.router.add_route(method, path, _answering(handler), expect_handler=_no_expectation)
    return app


class Channel:
    """Serves the side channel until stopped, which ends all leases."""

    def __init__(self, leases: LeaseTable, app: web.Application) -> None:
        self._leases = leases
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S)
        self._server: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> Self:
        """Start listening; port 0 selects a free port."""
        await self._runner.setup()
        assert self._runner.server is not None
        factory = bounded(self._runner.server)
        try:
            self._server = await asyncio.get_running_loop().create_server(factory, host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"reach_port: {host}:{port} cannot be bound ({error.strerror or error}); give a free "
                "reach_port, and an address of this machine as reach_host.",
                field="reach_port",
            ) from error
        self._sweeping = asyncio.create_task(self._leases.run(), name="the leases' sweep")
        return self

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop serving, and return all lent memory."""
        if self._sweeping:
            self._sweeping.cancel()
        if self._server:
            self._server.close()
        self._leases.end_all()
        await self._runner.cleanup()


def _guard(
    leases: LeaseTable, secret: Secret, replays: ReplayGuard
) -> Callable[..., Awaitable[web.Response]]:
    """Return the middleware: check the signature, handle, encrypt, and send within a time limit."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.Response]]
    ) -> web.Response:
        signed = None
        try:
            headers = request.headers.getall("Authorization", [])
            signed = SignedRequest.verified(secret, request.method, request.raw_path, headers)
            replays.admit(signed)
            await _check_body(request, signed.body_sha256)
            response = await handler(request)
        except web.HTTPException as error:
            response = _refused(leases, ReachError(*_ROUTING.get(error.status, _ROUTING[404])), error.status)
        except ReachError as refusal:
            response = _refused(leases, refusal, refusal.status)
        except SpecdecError as error:
            response = _refused(leases, ReachError("internal", str(error), field=error.field), 500)
        except Exception:
            logger.exception("a side-channel request failed")
            response = _refused(leases, ReachError("internal", "The server failed; see its log."), 500)
        if signed:
            assert isinstance(response.body, bytes)
            response.body = signed.encrypt(secret, response.status, response.body)
            response.content_type = "application/octet-stream"
        await _send(request, response)
        return response

    return guard


_ROUTING: Mapping[int, tuple[Reason, str]] = {
    404: ("no_route", "There is nothing at this address; this port is the side channel's."),
    405: ("no_route", "This address takes another method."),
    413: ("too_large", f"The body has more than {MOST_BODY_BYTES:,} bytes; send less."),
    417: ("malformed", "Expect: leave it out."),
}


def _answering(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=await handler(request, await request.read()), content_type="application/json"
        )

    return answer


async def _check_body(request: web.Request, sha256: str) -> None:
    """Read the signed body, bounded in size and time; compressed bodies are refused."""
    if (request.content_length or 0) > MOST_BODY_BYTES:
        raise ReachError(*_ROUTING[413])
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ReachError("malformed", "Content-Encoding: leave it out.", field="Content-Encoding")
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise ReachError(
            "slow_body", f"The body did not arrive within {BODY_S:g} s; send it at once."
        ) from None
    except web.RequestPayloadError:
        raise ReachError("malformed", "The body cannot be read; check its length.") from None
    if hashlib.sha256(body).hexdigest() != sha256:
        raise ReachError("unauthorized", "The body differs from the signed one; send that.")


def _refused(leases: LeaseTable, refusal: ReachError, status: int) -> web.Response:
    """Return an error response; close the connection if the body was not read."""
    leases.figures.refused[refusal.reason] += 1
    headers = {"WWW-Authenticate": SCHEME} if status == 401 else None
    response = web.Response(
        status=status, body=write_refusal(refusal), content_type="application/json", headers=headers
    )
    if status == 401 or refusal.reason in ("too_large", "slow_body"):
        response.force_close()
    return response


async def _send(request: web.Request, response: web.StreamResponse) -> None:
    """Send an answer; abort the connection of a peer that does not receive it."""
    try:
        async with asyncio.timeout(SEND_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport:
            request.transport.abort()
        raise ConnectionResetError("an answer was not taken") from None


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    """Hide library versions."""
    response.headers["Server"] = SERVER


async def _no_expectation(request: web.Request) -> web.Response:
    """Refuse `Expect` headers, which precede any middleware: bodies are small enough to send at once."""
    response = web.Response(
        status=417, body=write_refusal(ReachError(*_ROUTING[417])), content_type="application/json"
    )
    response.force_close()
    return response


def _lease_id(request: web.Request) -> str:
    text = request.match_info["lease"]
    if not LEASE_ID.fullmatch(text):
        raise ReachError("malformed", "The lease in the path must be 32 lower-case hexadecimal digits.")
    return text
