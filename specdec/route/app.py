"""The router's addresses: a few of its own, and all others of the replicas."""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE

from specdec.http.connection import SERVER
from specdec.ray.headers import of_request
from specdec.ray.prompts import Prompt, look_at
from specdec.ray.upstream import Sent
from specdec.route.addresses import Role
from specdec.route.apart import is_worth_it, pass_on_apart
from specdec.route.relay import Attempts, Call, pass_on
from specdec.route.spread import flush_all, merged_models
from specdec.route.state import SOON, State
from specdec.server.anthropic.errors import error_body, speaks_anthropic
from specdec.server.failures import Failure, failure_of, release_frames, without_panics
from specdec.server.receive import expect_later, read_body
from specdec.server.streams import send_whole

logger = logging.getLogger(__name__)

STATE = web.AppKey("state", State)
GONE = 499
"""nginx's status for a request whose client has disconnected."""
POLLED = {"/health", "/ready", "/metrics"}
"""Addresses that machines poll; they would fill the log."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
LARGE = 1 << 16
"""Bytes of a body that is looked at beside the event loop."""
STORED = re.compile(r"/v1/responses/(resp_[\w\-]{1,128})")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Asked(NamedTuple):
    """A request with its id."""

    request: web.Request
    state: State
    number: str


Handler = Callable[[Asked], Awaitable[web.StreamResponse]]


def build_app(state: State) -> web.Application:
    """Assemble the routes."""
    app = web.Application(client_max_size=state.config.max_body_bytes)
    app[STATE] = state
    app.on_response_prepare.append(_name)
    own: list[tuple[str, str, Handler]] = [
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/metrics", _metrics),
        ("GET", "/v1/models", _models),
        ("POST", "/flush_cache", _flush),
    ]
    others = [(method, "/{path:.*}", _others) for method in METHODS]
    for method, path, handler in [*own, *(("HEAD", *own[i][1:]) for i in range(3)), *others]:
        app.router.add_route(method, path, partial(_pass, handler), expect_handler=expect_later)
    return app


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    """Name this server where no replica names itself; versions would help attackers."""
    if response.headers.get("Server") == SERVER_SOFTWARE:
        response.headers["Server"] = SERVER


async def _pass(handler: Handler, request: web.Request) -> web.StreamResponse:
    """Log a request, and turn failures into error responses. An id is given to it where it has none."""
    number = request.headers.get("X-Request-ID") or uuid.uuid4().hex
    asked = Asked(request, request.app[STATE], number)
    start_s, state = time.perf_counter(), asked.state
    level = logging.DEBUG if request.path in POLLED else logging.INFO
    try:
        with state.connections.busy(request.protocol), without_panics():
            response = await handler(asked)
            if isinstance(response, web.Response):
                await send_whole(request, response, state.config.stall_timeout)
    except asyncio.CancelledError:
        state.metrics.broken.labels(who="client").inc()
        about = _about(asked, GONE, start_s)
        logger.log(
            level, "%(request_id)s %(path)s: client disconnected after %(ms).0f ms", about, extra=about
        )
        raise
    except ConnectionError as error:
        about = _about(asked, GONE, start_s) | {"reason": str(error) or type(error).__name__}
        logger.log(level, "%(request_id)s %(path)s: it was not ended (%(reason)s)", about, extra=about)
        return web.Response(status=GONE)  # nothing can be sent any more
    except Exception as error:
        failure = failure_of(error)
        if failure.trace:
            logger.error("%s %s failed", number, request.path, exc_info=failure.trace)
        response = failure.response(
            error_body(failure) if speaks_anthropic(request.path, request.headers) else None
        )
        response.headers.update({"X-Request-ID": number})
        release_frames(error)
    state.metrics.answers.labels(method=request.method, status=f"{response.status // 100}xx").inc()
    about = _about(asked, response.status, start_s)
    says = "%(request_id)s %(method)s %(path)s %(status)d in %(ms).0f ms"
    logger.log(level, says, about, extra=about)
    return response


def _about(asked: Asked, status: int, start_s: float) -> dict[str, Any]:
    """Return the fields of a request's log line."""
    request, number = asked.request, asked.number
    return {
        "request_id": number if re.fullmatch(r"[\w.:\-]{1,128}", number, re.ASCII) else "-",
        "method": request.method,
        "path": request.raw_path,
        "status": status,
        "ms": round((time.perf_counter() - start_s) * 1e3, 1),
    }


async def _health(asked: Asked) -> web.Response:
    return web.json_response({"status": "ok"})


async def _ready(asked: Asked) -> web.Response:
    """Report whether requests are accepted, and by any replica."""
    state = asked.state
    if state.draining:
        raise Failure(503, "The router is stopping.", code="stopping")
    if not state.fleet.is_ready:
        raise Failure(503, "No replica is up; try again later.", code="no_replica", headers=SOON)
    return web.json_response({"status": "ok", "replicas": sum(own.is_up for own in state.fleet.replicas)})


async def _metrics(asked: Asked) -> web.Response:
    asked.state.guard.check(asked.request)
    return web.Response(body=asked.state.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def _models(asked: Asked) -> web.StreamResponse:
    async with _read(asked) as call:
        return await merged_models(call.state, call.sent)


async def _flush(asked: Asked) -> web.StreamResponse:
    async with _read(asked) as call:
        return await flush_all(call.state, call.sent)


async def _others(asked: Asked) -> web.StreamResponse:
    """Hand a request to a replica, and its answer back."""
    request, state = asked.request, asked.state
    async with _read(asked) as call:
        if is_worth_it(call):
            return await pass_on_apart(call)
        stored = STORED.match(request.path)
        name = stored[1] if stored else call.prompt.follows
        only = state.owner(name) if name else None
        return await pass_on(call, Attempts(state, call.prompt, Role.BOTH, Role.DECODE, only=only))


@contextlib.asynccontextmanager
async def _read(asked: Asked) -> AsyncIterator[Call]:
    """Read a request that is admitted; its body is kept until a replica has begun to answer."""
    request, state, number = asked
    caller = request.remote or ""
    with state.under_way(caller), state.kept.holding(caller) as kept:
        with state.arriving.holding(caller) as arriving:
            received = await read_body(request, arriving, state.config.body_timeout)
            read_s = time.perf_counter()

            def look() -> tuple[bytes, Prompt]:
                body = received.unpack()
                return body, look_at(body, request.headers) if body else Prompt()

            is_large = received.is_packed or len(received.data) > LARGE
            body, prompt = await state.large.do(look, caller) if is_large else look()
        kept.add(len(body))
        headers = of_request(request.headers, is_unpacked=received.is_packed)
        headers.setdefault("X-Request-ID", number)
        # It begins with a slash, as all routes do: behind a replica's address only that is a path.
        sent = Sent(request.method, request.rel_url.raw_path_qs, headers, body)
        yield Call(state, request, number, prompt, sent, read_s)
