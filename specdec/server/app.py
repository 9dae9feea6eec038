"""The server's routes, and the middleware that every request passes."""

import asyncio
import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from aiohttp import web

from specdec import __version__
from specdec.core.outputs import EngineStats
from specdec.http.connection import SERVER
from specdec.server.addresses import name_address
from specdec.server.answers import RequestDeadline
from specdec.server.anthropic.errors import error_body, speaks_anthropic
from specdec.server.anthropic.handlers import count_tokens, message
from specdec.server.failures import Failure, failure_of, release_frames, without_panics
from specdec.server.generate import chat, complete
from specdec.server.openapi import described, documented
from specdec.server.origins import is_preflight, let_through
from specdec.server.page import HEADERS, WEB, playground
from specdec.server.plain import DetokenizeBody, TokenizeBody, read_plain
from specdec.server.receive import expect_later
from specdec.server.resident import Phase
from specdec.server.responses.handlers import delete, respond, retrieve
from specdec.server.state import ServedModel, ServerState
from specdec.server.streams import send_whole
from specdec.server.thinking import unread
from specdec.server.tools.offer import make_offer, untold
from specdec.setup.settings import Resolved

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request, ServerState], Awaitable[web.StreamResponse]]
STATE = web.AppKey("state", ServerState)
PAGES = playground(WEB)
OPEN = {"/health", "/ready", "/openapi.json", "/docs", "/version", *PAGES}
"""Routes without a key: load balancers have none, and the playground asks for it itself."""
STARTED = int(time.time())
GONE = 499
"""nginx's status for a request whose client has disconnected."""
POLLED = {"/health", "/ready", "/metrics"}
"""Routes polled by machines, logged at debug level only."""


def build_app(state: ServerState) -> web.Application:
    """Build the application with its routes."""
    app = web.Application(client_max_size=state.config.max_body_bytes, middlewares=[_pass, name_address])
    app[STATE] = state
    app.on_response_prepare.append(_head)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", complete),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/responses", respond),
        ("GET", "/v1/responses/{name}", retrieve),
        ("DELETE", "/v1/responses/{name}", delete),
        ("POST", "/v1/messages", message),
        ("POST", "/v1/messages/count_tokens", count_tokens),
        ("POST", "/v1/embeddings", _embeddings),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{name:.+}", _model),
        ("GET", "/health", _health),
        ("GET", "/ready", _ready),
        ("GET", "/metrics", _metrics),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/server_info", _server_info),
        ("GET", "/model_info", _model_info),
        ("POST", "/flush_cache", _flush_cache),
        ("GET", "/version", _version),
        ("GET", "/openapi.json", _openapi),
        ("GET", "/docs", _docs),
    ]
    pages = [("GET", path, page) for path, page in PAGES.items()]
    for method, path, handler in [*((a, b, _with_state(c)) for a, b, c in routes), *pages]:
        for verb in (method, "HEAD") if method == "GET" else (method,):
            app.router.add_route(verb, path, handler, expect_handler=expect_later)
    return app


async def _head(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every response has, whole, streamed or an error."""
    response.headers["Server"] = SERVER
    response.headers.update(request.get("headers", {}))
    response.headers.update(request.app[STATE].access.origins.headers(request.headers.get("Origin")))


def _with_state(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request, request.app[STATE])

    return answer


@web.middleware
async def _pass(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give a request its id, check its key, and turn failures into error responses."""
    number = _request_id(request.headers.get("X-Request-ID"))
    request["headers"] = {"X-Request-ID": number}
    is_anthropic = speaks_anthropic(request.path, request.headers)
    if is_anthropic:
        request["headers"]["request-id"] = number
    start_s, state = time.perf_counter(), request.app[STATE]
    level, reason = logging.DEBUG if request.path in POLLED else logging.INFO, {}
    try:
        if is_preflight(request):
            await state.turns.wait("")
            state.access.admit_preflight(request)
            response: web.StreamResponse = let_through(request)
        else:
            with contextlib.ExitStack() as protected, without_panics():
                await _admit(request, state, protected)
                with state.kept.holding(request["caller"] or request.remote or "") as request["kept"]:
                    response = await handler(request)
                    if isinstance(response, web.Response):
                        await send_whole(request, response, state.config.stall_timeout)
    except asyncio.CancelledError:
        fields = _about(request, GONE, start_s)
        message = "%(request_id)s %(path)s: client disconnected after %(ms).0f ms"
        logger.log(level, message, fields, extra=fields)
        raise
    except ConnectionError as error:
        fields = _about(request, GONE, start_s) | {"reason": str(error) or type(error).__name__}
        logger.log(level, "%(request_id)s %(path)s: client disconnected (%(reason)s)", fields, extra=fields)
        return web.Response(status=GONE)  # the client has disconnected
    except Exception as error:
        failure = failure_of(error)
        reason = failure.reason(in_full=state.config.log_prompts)
        if failure.status == 500:
            fields = _about(request, failure.status, start_s) | {"reason": str(failure)}
            message = "%(request_id)s %(path)s failed: %(reason)s"
            logger.error(message, fields, exc_info=failure.trace, extra=fields)
        response = failure.response(error_body(failure) if is_anthropic else None)
        release_frames(error)
    resource = request.match_info.route.resource
    if resource:  # unknown paths could be any text
        state.metrics.answered(resource.canonical, request.method, response.status)
    fields = _about(request, response.status, start_s) | reason
    message = "%(request_id)s %(method)s %(path)s %(status)d in %(ms).0f ms"
    message += "".join(f"; {name} %({name})s" for name in reason)
    logger.log(level, message, fields, extra=fields)
    return response


async def _admit(request: web.Request, state: ServerState, protected: contextlib.ExitStack) -> None:
    """Check a request's key, then wait for its turn on the event loop; refused requests share one turn.

    At the connection limit, a connection with an admitted request is not closed for a new one.
    """
    is_open = request.path in OPEN or (request.path == "/metrics" and state.config.metrics_open)
    caller = ""
    try:
        request["tenant"] = state.access.admit(request, needs_key=not is_open)
        request["caller"], request["turn"] = request["tenant"].caller, request["tenant"].flow[0]
        caller = request["caller"] or request.remote or ""
        if not is_open:
            protected.enter_context(state.connections.busy(request.protocol))
    finally:
        await state.turns.wait(caller)


def _about(request: web.Request, status: int, start_s: float) -> dict[str, Any]:
    """Return the fields of a request's log line; with JSON logs they are fields of the object."""
    return {
        "request_id": request["headers"]["X-Request-ID"],
        "method": request.method,
        "path": request.raw_path,
        "status": status,
        "ms": round((time.perf_counter() - start_s) * 1e3, 1),
    }


def _request_id(header: str | None) -> str:
    """Use the client's request id if it is safe in a header and a log; else create one."""
    return header if header and re.fullmatch(r"[\w.:\-]{1,128}", header, re.ASCII) else uuid.uuid4().hex


async def _embeddings(request: web.Request, state: ServerState) -> web.Response:
    raise Failure(404, "This server only generates text: embeddings are not supported.", code="not_supported")


async def _models(request: web.Request, state: ServerState) -> web.Response:
    cards = [_card(model, name) for model in state.served for name in model.names]
    ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return web.json_response({"object": "list", "data": cards, **ends})


async def _model(request: web.Request, state: ServerState) -> web.Response:
    name = request.match_info["name"]
    return web.json_response(_card(state.named(name), name))


def _card(served: ServedModel, name: str) -> dict[str, Any]:
    """Return a model card with the fields of OpenAI's, vLLM's and Anthropic's APIs."""
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "specdec",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(STARTED, UTC).isoformat(),
        "root": served.name,
        "parent": None,
        "max_model_len": served.max_model_len,
        "state": served.resident.status,
    }


async def _health(request: web.Request, state: ServerState) -> web.Response:
    """Report whether the engines are alive and stepping."""
    for served in state.served:
        served.check_engine()
        served.check_step()
    return web.json_response({"status": "ok"})


async def _ready(request: web.Request, state: ServerState) -> web.Response:
    """Report whether requests are accepted."""
    for served in state.served:
        served.check_engine()
    if state.draining:
        raise Failure(503, "The server is stopping.", code="stopping")
    return await _health(request, state)


async def _metrics(request: web.Request, state: ServerState) -> web.Response:
    return web.Response(body=await state.metrics.scrape(), headers={"Content-Type": CONTENT_TYPE})


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def _tokenize(request: web.Request, state: ServerState) -> web.Response:
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, partial(read_plain, TokenizeBody))
    served = state.named(body.model)
    unsupported = [
        *untold(body.tools, None, told=served.told),
        *unread(body.chat_template_kwargs or {}, served.template),
    ]
    request["headers"] |= state.ignored.headers([*unsupported, *body.ignored])
    with state.under_way(served, 1, deadline, caller=request["caller"]):
        async with deadline.held():
            await served.ready()
            ids = await _tokens(body, served, request["turn"])
        result = {"tokens": ids, "count": len(ids), "max_model_len": served.max_model_len}
        return await send_whole(request, web.json_response(result), state.config.stall_timeout)


async def _tokens(body: TokenizeBody, served: ServedModel, caller: str) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise Failure(400, "prompt: give either a prompt or messages.", param="prompt")
    if body.messages is not None:
        offer = make_offer(body.tools, None, parallel=True, form=served.calls, told=served.told)
        options = {**served.template_kwargs, **(body.chat_template_kwargs or {})}
        variables = {**options, **({"tools": offer.plain} if offer else {})}
        chat = await served.encode_chat(body.messages, variables, caller, answer=body.add_generation_prompt)
        return chat.ids
    assert body.prompt is not None
    served.engine.check_length(body.prompt)
    return await served.encode(body.prompt, caller, special=body.add_special_tokens)


async def _detokenize(request: web.Request, state: ServerState) -> web.Response:
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, partial(read_plain, DetokenizeBody))
    served = state.named(body.model)
    request["headers"] |= state.ignored.headers(body.ignored)
    with state.under_way(served, 1, deadline, caller=request["caller"]):
        async with deadline.held():
            await served.ready()
            return web.json_response({"prompt": await _text(body, served, request["turn"])})


async def _text(body: DetokenizeBody, served: ServedModel, caller: str) -> str:
    tokenizer, vocab = served.engine.tokenizer, served.engine.model.network.spec.vocab
    if tokenizer is None:
        raise Failure(400, "tokens: the model has no tokenizer, so they have no text.", param="tokens")
    if len(body.tokens) > (max_model_len := served.engine.model.settings.max_model_len):
        raise Failure(
            400,
            f"tokens: {len(body.tokens):,} are more than {max_model_len:,}, the max_model_len.",
            param="tokens",
        )
    if any(not 0 <= token < vocab for token in body.tokens):
        raise Failure(400, f"tokens: token ids are integers from 0 to {vocab - 1}.", param="tokens")
    return await served.work(len(body.tokens), partial(tokenizer.decode, body.tokens), caller)


async def _flush_cache(request: web.Request, state: ServerState) -> web.Response:
    """Flush the caller's cached prefixes and the outputs that drafters look up."""
    async with RequestDeadline(state.config.request_timeout).held():
        flushing = [engine.begin_flush(request["caller"]) for engine in state.engines if not engine.fault]
        await asyncio.gather(*map(asyncio.wrap_future, flushing))
    return web.json_response({"status": "ok"})


async def _version(request: web.Request, state: ServerState) -> web.Response:
    return web.json_response({"version": __version__})


async def _docs(request: web.Request, state: ServerState) -> web.Response:
    return web.Response(text=documented(), content_type="text/html", charset="utf-8", headers=HEADERS)


async def _openapi(request: web.Request, state: ServerState) -> web.Response:
    return web.Response(text=described(), content_type="application/json")


async def _server_info(request: web.Request, state: ServerState) -> web.Response:
    """Return a model's resolved settings and counters, without keys or prompts."""
    served = state.named(request.query.get("model"))
    resident = served.resident
    info = {
        "version": __version__,
        "model": served.name,
        "served_model_name": served.name,
        **_reach_info(state),
        "models": {model.name: model.resident.status for model in state.served},
        "chat_template": not served.template.is_plain,
        "tools": served.told and served.calls is not None,
        **served.parsers,
        "writes": served.writes,
        "sampling_defaults": dict(served.sampling),
        "stored_responses": {"count": state.responses.count, "bytes": state.responses.size},
        **(_engine_info(served) if resident.engine and resident.phase is not Phase.UNLOADING else {}),
    }
    return web.Response(text=json.dumps(info), content_type="application/json")


async def _model_info(request: web.Request, state: ServerState) -> web.Response:
    """Return the model in SGLang's format, for its router; the folder's path is not shown."""
    served = state.named(request.query.get("model"))
    return web.json_response(
        {"model_path": served.name, "served_model_name": served.name, "is_generation": True}
    )


def _reach_info(state: ServerState) -> dict[str, Any]:
    """Return the server's role, also in SGLang's format, which its routers query."""
    reach = state.reach
    mode = {"disaggregation_mode": reach.role if reach and reach.role != "both" else "null"}
    if reach is None:
        return {"role": None, **mode}
    return {"role": reach.role, **mode, "disaggregation_bootstrap_port": reach.port}


def _engine_info(served: ServedModel) -> dict[str, Any]:
    engine = served.engine
    stats = engine.stats()
    return {
        **_resolved_settings(engine.model.settings),
        "engine": engine.config.model_dump(mode="json", exclude_defaults=True),
        "steps": stats.steps,
        "tokens": stats.tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_by_depth": list(stats.per_depth),
        "acceptance_by_context": {
            str(bound): {**asdict(counts), "acceptance_length": counts.acceptance_length}
            for bound, counts in stats.by_context.items()
        },
        "running": stats.running,
        "waiting": stats.waiting,
        "preemptions": stats.preemptions,
        "limited_by": stats.limited_by,
        "failed_steps": stats.failed_steps,
        "clean_checks": stats.clean_checks,
        "moved_blocks": stats.moved_blocks,
        "arena": asdict(stats.arena),
        "prefixes": asdict(stats.prefixes) if stats.prefixes else None,
        "speculation": _speculation(stats),
    }


def _speculation(stats: EngineStats) -> dict[str, Any] | None:
    """Return the current draft shape and the reason; both figures are null if it is fixed."""
    state = stats.speculation
    if state is None:
        return None
    return {"name": state.name, "reason": state.reason, "expected_tokens": state.tokens, "cost": state.cost}


def _resolved_settings(settings: Resolved) -> dict[str, Any]:
    """Return the resolved settings, the largest draft and the memory layout."""
    values = settings.named()
    bounds, layout = values.pop("bounds"), values.pop("layout")
    return {
        **values,
        "device": str(settings.device),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "kv_dtype": str(layout.page_dtype).removeprefix("torch."),
        **asdict(bounds),
        "layout": asdict(layout.describe()),
    }
