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
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from multidict import CIMultiDict, CIMultiDictProxy

from specdec.ray.fleet import Asked, Fleet
from specdec.ray.headers import of_request
from specdec.ray.load import Flight
from specdec.ray.prompts import OWNERS, Prompt, look_at
from specdec.ray.settings import RayApp
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


class Ingress:
    """Choose and relay. `replicas` is Ray's handle of the Engine deployment."""

    def __init__(self, app: RayApp, replicas: Any) -> None:
        self._config, self._most_bytes = app.config, app.server.max_body_bytes
        self._body_timeout = app.server.body_timeout
        self._bodies = BodyBudget(KEPT_BYTES, app.server.max_body_bytes)
        self._replicas, self._fleet = replicas, Fleet(app.config.load_factor)
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
        stored = STORED.match(call.path)
        only = self._fleet.owner(stored[1] if stored else call.prompt.follows)
        asked, lost, refusal = Asked(self._fleet, call.prompt, only), 0, None
        for _ in range(self._config.attempts):
            async with self._chosen(asked) as (name, url, flight):
                if name in asked.tried or lost >= MOST_LOST:
                    break
                asked.tried.add(name)
                try:
                    async with self._upstream.ask(url, call.sent) as answer:
                        if answer.status not in REFUSED:
                            flight.begun(is_error=answer.status >= 400)
                            return await self._pass_on(call, answer, name)
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
            return await call.respond(*refusal)
        if lost:
            raise Failure(502, "The replica was lost before its answer started.", code="replica_lost")
        raise _no_replica()

    @contextlib.asynccontextmanager
    async def _chosen(self, asked: Asked) -> AsyncIterator[tuple[str, str, Flight]]:
        """Hold a slot of the best untried replica; yield its id, its address, and the request's flight."""
        async with contextlib.AsyncExitStack() as stack:
            asked.is_choosing = True
            stack.callback(asked.end)
            try:
                async with asyncio.timeout(self._config.choice_timeout):
                    chosen = await stack.enter_async_context(self._replicas.choose_replica(asked))
            except TimeoutError:
                raise _no_replica() from None
            finally:
                asked.is_choosing = False
            name = chosen.replica_id
            yield name, chosen.replica_metadata["url"], asked.take(name)

    async def _pass_on(self, call: Call, answer: Answer, name: str) -> None:
        """Relay an answer. A stream whose replica dies ends with an error event."""
        if call.path == RESPONSES and (found := STORED_ID.search(answer.first)):
            self._fleet.own(found[1].decode(), name)
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

    async def _flush(self, call: Call) -> None:
        """Ask all replicas; the first failure is the response."""
        if not self._fleet.urls:
            async with self._chosen(Asked(self._fleet, call.prompt)):
                pass
        told = []
        for name, url in self._fleet.urls.items():
            self._fleet.loads[name].known.forget()
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
