"""The completion and chat handlers: one request, its choices, whole or streamed."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from specdec.core.outputs import Delta
from specdec.core.terms import Prepared
from specdec.server.answers import Answers, Deadline
from specdec.server.bodies import Body, ChatBody, CompletionBody
from specdec.server.failures import Failure, Names, naming, renamed
from specdec.server.formats import Chats, Completions, Echo, Envelope, Format, Shown, Usage
from specdec.server.messages import as_read, beginnings
from specdec.server.metrics import Watch
from specdec.server.state import Served, State, worked
from specdec.server.streams import EventStream, send_whole
from specdec.server.tools.offer import untold

logger = logging.getLogger(__name__)

SPELLING = 5
"""Times as long as reading a character takes spelling a token."""


async def complete(request: web.Request, state: State) -> web.StreamResponse:
    """Answer /v1/completions."""
    until = Deadline(state.config.request_timeout)
    body = CompletionBody.read(await request.read())
    served = state.named(body.model)
    request["headers"] |= state.ignored.headers(body.ignored)
    if len(body.prompts) > state.config.max_prompts:
        most = state.config.max_prompts
        raise Failure(
            400, f"prompt: {len(body.prompts)} prompts are more than the {most} of a request.", param="prompt"
        )
    params = body.params(logprobs=body.logprobs, prompt_logprobs=body.scored)

    def echo(prepared: Sequence[Prepared]) -> list[Echo]:
        return [Echo.of(*each, served.engine.tokenizer) for each in zip(body.prompts, prepared, strict=True)]

    names = {"structured_outputs": "response_format"} if body.response_format else {}
    choices, field = len(body.prompts) * params.n, "n" if params.n > 1 else "prompt"
    kept_s = body.keep_alive_s
    with naming(names), state.under_way(served, choices, until, field=field, keep_alive_s=kept_s):
        async with until.held():
            await served.ready()
            prepared = await served.prepare(body.prompts, params, request["caller"])
            ids = sum(len(own.ids) for own in prepared)
            echoes = await worked(ids * SPELLING, partial(echo, prepared)) if body.echo else []
        form = Completions(served.engine.tokenizer, _shown(body), echoes, params.n)
        return await _answer(request, state, served, body, prepared, form, until, names)


async def chat(request: web.Request, state: State) -> web.StreamResponse:
    """Answer /v1/chat/completions."""
    until = Deadline(state.config.request_timeout)
    body = ChatBody.read(await request.read())
    served = state.named(body.model)
    untold_of = untold(body.tools, body.tool_choice, told=served.told)
    request["headers"] |= state.ignored.headers([*untold_of, *body.ignored])
    offer = body.offer(served.calls, told=served.told)
    variables = {**body.variables, **({"tools": offer.plain} if offer else {})}
    forced = {"structured_outputs": offer.structure} if offer and offer.structure else {}
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    default = max(served.default_max_tokens, body.min_tokens or 0)
    params = body.params(logprobs=body.shown, max_tokens=default if asked is None else asked, **forced)
    asker = "tools" if forced else "response_format" if body.response_format else "structured_outputs"
    names = {"prompt": "messages", "structured_outputs": asker}
    with naming(names), state.under_way(served, params.n, until, keep_alive_s=body.keep_alive_s):
        async with until.held():
            await served.ready()
            ids = await served.encode_chat(
                as_read(body.messages), variables, answer=body.add_generation_prompt
            )
            marks = await served.marks(ids, beginnings(body.messages), variables)
            own: dict[str, Any] = {"cache_marks": marks or None}
            if asked is None:
                most = served.engine.model.settings.max_model_len
                own["max_tokens"] = max(min(default, most - len(ids)), 1)
            params = params.model_copy(update=own)
            prepared = await served.prepare([ids], params, request["caller"])
        form = Chats(served.engine.tokenizer, _shown(body), offer)
        return await _answer(request, state, served, body, prepared, form, until, names)


async def _answer(
    request: web.Request,
    state: State,
    served: Served,
    body: Body,
    prepared: Sequence[Prepared],
    form: Format,
    until: Deadline,
    names: Names,
) -> web.StreamResponse:
    envelope = Envelope(form, body.model or served.name, prepared)
    answers = Answers(served.engine, state.bell, prepared, streams=body.stream, until=until)
    usage, stall_s = Usage(answers.prompt_tokens, prepared[0].params.n), state.config.stall_timeout
    metrics, resident = served.metrics, served.resident
    with metrics.request(prepared, until.start_s) as watch, answers, resident.answering(answers):
        if body.stream:
            stream = EventStream(request, stall_s)
            return await _stream(answers, envelope, usage, watch, body, stream, names)
        whole = await _whole(answers, envelope, usage, watch, body)
    return await send_whole(request, web.Response(text=whole, content_type="application/json"), stall_s)


async def _whole(answers: Answers, envelope: Envelope, usage: Usage, watch: Watch, body: Body) -> str:
    said: dict[int, list[Delta]] = {}
    async for own in answers:
        choice, delta, _ = own
        usage.add(choice, delta)
        watch.said(own)
        said.setdefault(choice, []).append(delta)

    def write(choice: int) -> str:
        return json.dumps(envelope.form.said(choice, Delta.joined(said[choice])) | envelope.prompt_of(choice))

    spelt = sum(delta.num_told for deltas in said.values() for delta in deltas)
    choices = await worked(spelt * SPELLING, lambda: [write(choice) for choice in sorted(said)])
    extra = {"metrics": usage.metrics()} if body.return_metrics else {}
    return envelope.written(choices, {"usage": usage.as_json()} | extra)


async def _stream(
    answers: Answers,
    envelope: Envelope,
    usage: Usage,
    watch: Watch,
    body: Body,
    stream: EventStream,
    names: Names,
) -> web.StreamResponse:
    """Stream the deltas. After the first event an error is an event too: the status has been sent."""
    opened: set[int] = set()
    try:
        async for own in answers:
            choice, delta, _ = own
            usage.add(choice, delta)
            watch.said(own)
            parts = await worked(delta.num_told * SPELLING, partial(envelope.form.parts, choice, delta))
            if choice not in opened:
                opened.add(choice)
                opening = envelope.form.first(choice)
                parts = [opening, *parts] if opening else parts
                parts[:1] = [part | envelope.prompt_of(choice) for part in parts[:1]]
            if parts:
                await stream.send(*(_with_usage(envelope.chunk([part]), usage, body) for part in parts))
        if body.includes_usage or body.return_metrics:
            last = envelope.chunk([])
            last |= {"usage": usage.as_json()} if body.includes_usage else {}
            last |= {"metrics": usage.metrics()} if body.return_metrics else {}
            await stream.send(last)
    except Exception as error:
        if not stream.begun or isinstance(error, ConnectionError):
            raise
        watch.fail(error)
        failure = renamed(error, names)
        if failure.status == 500:
            logger.error(
                "%s failed in mid-stream: %s",
                stream.number,
                failure,
                exc_info=failure.trace,
                extra={"request_id": stream.number},
            )
        await stream.send(failure.body)
    return await stream.end()


def _with_usage(chunk: dict[str, Any], usage: Usage, body: Body) -> dict[str, Any]:
    if body.counts_on:
        return chunk | {"usage": usage.as_json()}
    return chunk | {"usage": None} if body.includes_usage else chunk


def _shown(body: Body) -> Shown:
    scored = body.prompt_logprobs is not None
    return Shown(body.return_token_ids, body.return_origins, body.return_drafts, scored)
