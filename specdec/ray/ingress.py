"""Ingress deployment: reads a request, chooses a replica through Ray, and relays bytes.

Tokens never pass through Ray. It is an ASGI application, as Ray Serve's proxies expect.
"""

import asyncio
import contextlib
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from multidict import CIMultiDict, CIMultiDictProxy

from specdec.ray.fleet import Asked, Fleet
from specdec.ray.headers import of_request
from specdec.ray.load import Flight
from specdec.ray.prompts import OWNERS, Prompt, look_at
from specdec.ray.settings import RayApp
from specdec.ray.two_step import decode_body, is_two_step, prefill_body, transfer_params
from specdec.ray.upstream import REFUSED, Answer, Late, Lost, Sent, TooLong, Unreached, Upstream
from specdec.server.anthropic.errors import error_body, speaks_anthropic
from specdec.server.failures import Failure, failure_of
from specdec.server.receive import BodyBudget, HeldBody

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SOON = {"Retry-After": "1"}
MOST_LOST = 2
"""Replicas that may fail with one request: it may be what ends them."""
KEPT_BYTES = 384 << 20
"""Maximum bytes of request bodies, kept until their requests end. Keys are callers; replicas check them."""
LARGE = 1 << 16
"""Bytes of a body that is parsed in a thread."""
STORED = re.compile(r"/v1/responses/(resp_[\w\-]{1,128})")
STORED_ID = re.compile(rb'"id":\s*"(resp_[\w\-]{1,128})"')
"""The id of a stored response, at the start of an answer."""
OWN_HEADERS = {"date", "server", "x-request-id"}
"""Response headers that Ray Serve adds itself."""
RESPONSES = "/v1/responses"


@dataclass(slots=True)
class Call:
    """A client's request."""

    sent: Sent
    path: str
    prompt: Prompt
    send: Send
    has_begun: bool = False
    """Whether the status has been sent."""

    @property
    def number(self) -> str:
        return self.sent.headers["X-Request-ID"]

    async def respond(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send a whole response."""
        await self.begin(status, headers)
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Send the status and headers."""
        told = [
            (name.lower().encode("latin-1"), value.encode("utf-8", "surrogateescape"))
            for name, value in headers.items()
            if name.lower() not in OWN_HEADERS
        ]
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": told})

    async def fail(self, failure: Failure) -> None:
        """Send an error response in the API's format."""
        anthropic = speaks_anthropic(self.path, self.sent.headers)
        body = json.dumps(error_body(failure) if anthropic else failure.body).encode()
        headers = CIMultiDict({**failure.headers, "Content-Type": "application/json"})
        headers["Content-Length"] = str(len(body))
        await self.respond(failure.status, headers, body)

    def error_event(self, failure: Failure) -> bytes:
        """Return the events that end a stream with an error."""
        if speaks_anthropic(self.path, self.sent.headers):
            return f"event: error\ndata: {json.dumps(error_body(failure))}\n\n".encode()
        if self.path == RESPONSES:
            told = {"type": "error", "code": failure.code, "message": str(failure), "param": None}
            return f"event: error\ndata: {json.dumps(told | {'sequence_number': 0})}\n\n".encode()
        return f"data: {json.dumps(failure.body)}\n\ndata: [DONE]\n\n".encode()


class Group(NamedTuple):
    """Replicas with one role: Ray's handle of their deployment, and their loads."""

    handle: Any
    fleet: Fleet
    timeout_s: float
    """Maximum seconds to wait for a replica."""


Refusal = tuple[int, CIMultiDict[str], bytes]
"""Status, headers and body."""
Take = Callable[[Answer, str], Awaitable[Refusal | None]]
"""Reads an answer that has begun; the name is its replica's."""


class Ingress:
    """Choose and relay. `replicas` and `prefill` are Ray's handles of the Engine deployments."""

    def __init__(self, app: RayApp, replicas: Any, prefill: Any = None) -> None:
        self._config, self._most_bytes = app.config, app.server.max_body_bytes
        self._body_timeout = app.server.body_timeout
        self._bodies = BodyBudget(KEPT_BYTES, app.server.max_body_bytes)
        config = app.config
        self._replicas = Group(replicas, Fleet(config.load_factor), config.choice_timeout)
        self._prefill = Group(prefill, Fleet(config.load_factor), config.connect_timeout) if prefill else None
        self._upstream = Upstream(app.config.connect_timeout, app.config.answer_timeout)

    def __serve_build_asgi_app__(self) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Return the application; Ray Serve calls this in the replica's process."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await _live(receive, send)
            elif scope["type"] == "http":
                await self._answer(scope, receive, send)

        return answer  # a function: uvicorn takes a bound method for ASGI 2

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(_sent(scope), scope["path"], Prompt(), send)
        headers = call.sent.headers
        try:
            with self._bodies.holding(" ".join(headers.get(name, "") for name in OWNERS)) as held:
                body = await self._body(receive, held)
                if body is None:
                    return
                call.sent = call.sent._replace(body=body)
                if body:
                    is_large = len(body) > LARGE
                    found = asyncio.to_thread(look_at, body, headers) if is_large else look_at(body, headers)
                    call.prompt = found if isinstance(found, Prompt) else await found
                await _until_left(self._relay(call), receive)
        except Exception as error:
            if call.has_begun:
                raise  # the server closes the connection: the answer has no end
            failure = failure_of(error)
            if failure.trace:
                logger.error("%s %s failed", call.number, call.path, exc_info=failure.trace)
            await call.fail(failure)

    async def _body(self, receive: Receive, held: HeldBody) -> bytes | None:
        """Receive the body; None if the client disconnects."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += (piece := message.get("body", b""))
                    held.add(len(piece))
                    if len(body) > self._most_bytes:
                        raise Failure(413, "The body has more bytes than max_body_bytes allows.")
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise Failure(408, "The body did not arrive within body_timeout.") from None

    async def _relay(self, call: Call) -> None:
        """Try replicas until one begins to answer."""
        if call.path == "/flush_cache":
            return await self._flush(call)
        fleet, stored, refusal = self._replicas.fleet, STORED.match(call.path), None
        if self._prefill and is_two_step(call.path, call.prompt):
            cached = max((load.known.hit(call.prompt) for load in fleet.loads.values()), default=0)
            if call.prompt.size - cached >= self._config.prefill_min_bytes:
                refusal = await self._read_first(call, self._prefill)
        if refusal is None:
            only = fleet.owner(stored[1] if stored else call.prompt.follows)
            asked = Asked(fleet, call.prompt, only)
            refusal = await self._ask(call, self._replicas, asked, call.sent, partial(self._pass_on, call))
        if refusal:
            await call.respond(*refusal)

    async def _read_first(self, call: Call, prefill: Group) -> Refusal | None:
        """Lend the prompt from a prefill instance; without one the decode instance prefills it.

        Return the response that says what is wrong with the request.
        """
        sent = call.sent._replace(body=prefill_body(call.prompt))
        prompt = replace(call.prompt, is_streamed=True)  # its first byte is the end of prefill

        async def take(answer: Answer, name: str) -> Refusal | None:
            whole = await answer.whole()
            if params := transfer_params(whole) if answer.status == 200 else None:
                call.sent = call.sent._replace(body=decode_body(call.prompt, params))
            return (answer.status, answer.headers, whole) if 400 <= answer.status < 500 else None

        try:
            refusal = await self._ask(call, prefill, Asked(prefill.fleet, prompt), sent, take)
        except Failure as failure:
            logger.info("%s: the decode instance prefills: %s", call.number, failure)
            return None
        return None if refusal and refusal[0] in REFUSED else refusal

    async def _ask(self, call: Call, group: Group, asked: Asked, sent: Sent, take: Take) -> Refusal | None:
        """Try replicas until one begins to answer, and let `take` read it; return the last refusal."""
        lost, refusal = 0, None
        for _ in range(self._config.attempts):
            async with self._chosen(group, asked) as (name, url, flight):
                if name in asked.tried or lost >= MOST_LOST:
                    break
                asked.tried.add(name)
                try:
                    async with self._upstream.ask(url, sent) as answer:
                        if answer.status not in REFUSED:
                            flight.begun(is_error=answer.status >= 400)
                            return await take(answer, name)
                        refusal = answer.status, answer.headers, await answer.whole()
                except Unreached as error:
                    logger.info("%s: %s cannot be reached: %s", call.number, url, error)
                except (Lost, TooLong) as error:
                    if call.has_begun:
                        raise
                    lost += 1
                    logger.warning("%s: %s was lost: %s", call.number, url, error)
                except Late:
                    says = "The replica sent nothing within answer_timeout."
                    raise Failure(504, says, code="replica_timeout") from None
        if refusal:
            return refusal
        if lost:
            raise Failure(502, "The replica was lost before its answer started.", code="replica_lost")
        raise _no_replica()

    @contextlib.asynccontextmanager
    async def _chosen(self, group: Group, asked: Asked) -> AsyncIterator[tuple[str, str, Flight]]:
        """Hold a slot of the best untried replica; yield its id, its address, and the request's flight."""
        async with contextlib.AsyncExitStack() as stack:
            asked.is_choosing = True
            stack.callback(asked.end)
            try:
                async with asyncio.timeout(group.timeout_s):
                    chosen = await stack.enter_async_context(group.handle.choose_replica(asked))
            except TimeoutError:
                raise _no_replica() from None
            finally:
                asked.is_choosing = False
            name = chosen.replica_id
            yield name, chosen.replica_metadata["url"], asked.take(name)

    async def _pass_on(self, call: Call, answer: Answer, name: str) -> Refusal | None:
        """Relay an answer. A stream whose replica dies ends with an error event."""
        if call.path == RESPONSES and (found := STORED_ID.search(answer.first)):
            self._replicas.fleet.own(found[1].decode(), name)
        await call.begin(answer.status, answer.headers)
        is_stream = answer.headers.get("Content-Type", "").startswith("text/event-stream")
        held = b""
        try:
            async for piece in answer.pieces():
                if is_stream:  # an event that is cut off would spoil the error's
                    whole, end, held = (held + piece).rpartition(b"\n\n")
                    piece = whole + end
                if piece:
                    await call.send({"type": "http.response.body", "body": piece, "more_body": True})
        except (Lost, Late, Unreached) as error:
            logger.warning("%s: the answer of %s broke off: %s", call.number, name, error)
            if not is_stream:
                raise
            failure = Failure(502, "The replica was lost during its answer.", code="replica_lost")
            held = call.error_event(failure)
        await call.send({"type": "http.response.body", "body": held})
        return None

    async def _flush(self, call: Call) -> None:
        """Ask all replicas; the first failure is the response."""
        told = []
        for group in filter(None, (self._replicas, self._prefill)):
            if not group.fleet.urls:
                async with self._chosen(group, Asked(group.fleet, call.prompt)):
                    pass
            for name, url in group.fleet.urls.items():
                group.fleet.loads[name].known.forget()
                with contextlib.suppress(Unreached, Lost, Late, TooLong):
                    async with self._upstream.ask(url, call.sent) as answer:
                        told.append((answer.status, answer.headers, await answer.whole()))
        if not told:
            raise _no_replica()
        await call.respond(*next((own for own in told if own[0] != 200), told[0]))


def _no_replica() -> Failure:
    says = "No replica can be reached; try again later."
    return Failure(503, says, code="no_replica", headers=SOON)


def _sent(scope: Scope) -> Sent:
    """Return a request as replicas get it, still without its body."""
    named = CIMultiDict(
        (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in scope["headers"]
    )
    headers = of_request(CIMultiDictProxy(named), is_unpacked=False)
    headers.setdefault("X-Request-ID", uuid.uuid4().hex)
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string") or b""
    return Sent(scope["method"], (path + b"?" + query if query else path).decode("latin-1"), headers, b"")


async def _until_left(work: Awaitable[None], receive: Receive) -> None:
    """Finish the work, or cancel it when the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
        for task in (working, leaving):
            if not task.cancelled():
                task.exception()  # it is raised above, or the client is gone


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    """Follow ASGI's lifespan protocol: there is nothing to start or stop."""
    while True:
        kind: Mapping[str, Any] = await receive()
        if kind["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            return await send({"type": "lifespan.shutdown.complete"})
