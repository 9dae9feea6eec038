"""The completion and chat handlers: one request, its choices, whole or streamed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from aiohttp import web

from specdec.config.sampling import SamplingParams
from specdec.core.outputs import CollectedOutput, Delta
from specdec.core.params import PreparedPrompt
from specdec.server.answers import Answers, RequestDeadline, check_size
from specdec.server.bodies import ASKED, ChatBody, CompletionBody, RequestBody
from specdec.server.chunks import Chunks
from specdec.server.events import ExpectedContent
from specdec.server.failures import SAME, Failure, Names, chained, naming, renamed
from specdec.server.fields import MAX_TOKENS
from specdec.server.formats import AnswerWriter, ChatFormat, CompletionFormat, PromptEcho, ShownFields
from specdec.server.metrics import RequestTracker
from specdec.server.reach.bodies import Asked, LendFields
from specdec.server.reach.lending import Lending, lending_params
from specdec.server.state import LONG, QueueSlots, ServedModel, ServerState
from specdec.server.streams import EventStream, send_pieces
from specdec.server.thinking import ThinkingTokens, span_of, template_variables
from specdec.server.tools.offer import ToolOffer, untold

logger = logging.getLogger(__name__)

SPELLING = 5
"""Cost of decoding a token, relative to encoding a character."""
Work = Callable[[int, Callable[[], Any]], Awaitable[Any]]
"""Runs work of a given size in the caller's turn: `ServedModel.work`."""
MakeWriter = Callable[[ExpectedContent, Sequence[PreparedPrompt]], AnswerWriter]


async def complete(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Answer /v1/completions."""
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, CompletionBody.read)
    served = state.named(body.model)
    request["headers"] |= state.ignored.headers(body.ignored)
    if len(body.prompts) > state.config.max_prompts:
        max_prompts = state.config.max_prompts
        raise Failure(
            400,
            f"prompt: {len(body.prompts)} prompts are more than the {max_prompts} of a request.",
            param="prompt",
        )
    transfer = body.asked(state.role, len(body.prompts))
    is_lending = isinstance(transfer, LendFields)

    def read() -> SamplingParams:
        if is_lending:
            return lending_params(body)
        return body.params(served.sampling, logprobs=body.logprobs, prompt_logprobs=body.scored)

    params = await state.run_by_size(request, deadline, read)

    def echo(prepared: Sequence[PreparedPrompt]) -> list[PromptEcho]:
        return [
            PromptEcho.of(*pair, served.engine.tokenizer) for pair in zip(body.prompts, prepared, strict=True)
        ]

    names = ASKED["response_format" if body.response_format else "structured_outputs"]
    choices, field = len(body.prompts) * params.n, "n" if params.n > 1 else "prompt"
    caller, kept_s = request["caller"], body.keep_alive_s
    with (
        naming(names),
        _notifying_readers(state, transfer),
        state.under_way(served, choices, deadline, caller=caller, field=field, keep_alive_s=kept_s) as places,
    ):
        async with deadline.held():
            await served.ready()
            prepared = await served.prepare(body.prompts, params, request["tenant"])
            ids = sum(len(prompt.ids) for prompt in prepared)
            echoes = []
            if body.echo and not is_lending:
                echoes = await served.work(ids * SPELLING, partial(echo, prepared), request["turn"])
            _check_size(state, served, prepared, "logprobs")
            await _fetch(state, prepared, transfer)
        answer_format = CompletionFormat(served.engine.tokenizer, _shown(body), echoes, params.n)
        writer = Chunks(answer_format, body, body.model or served.name, prepared)
        return await _answer(
            request, state, served, prepared, writer, deadline, places, names, transfer, streams=body.stream
        )


async def chat(request: web.Request, state: ServerState) -> web.StreamResponse:
    """Answer /v1/chat/completions."""
    deadline = RequestDeadline(state.config.request_timeout)
    body = await state.read(request, deadline, ChatBody.read)
    served = state.named(body.model)

    def write(expected: ExpectedContent, prepared: Sequence[PreparedPrompt]) -> AnswerWriter:
        answer_format = ChatFormat(served.engine.tokenizer, _shown(body), expected)
        return Chunks(answer_format, body, body.model or served.name, prepared)

    return await answer_chat(request, state, served, body, deadline, write)


async def answer_chat(
    request: web.Request,
    state: ServerState,
    served: ServedModel,
    body: ChatBody,
    deadline: RequestDeadline,
    write: MakeWriter,
    *,
    ignored: Sequence[str] = (),
    names: Names = SAME,
) -> web.StreamResponse:
    """Answer a chat of any API, with its field names and response format."""
    with naming(names):
        served.check_turns(len(body.messages))
        most_asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        default, budget = max(served.default_max_tokens, body.min_tokens or 0), body.budget
        transfer = body.asked(state.role)
        is_lending = isinstance(transfer, LendFields)

        def resolve() -> tuple[ToolOffer | None, dict[str, Any], list[str], SamplingParams]:
            offer = body.offer(served.calls, told=served.told)
            variables, unsupported = template_settings(body, offer, served)
            if is_lending:
                return offer, variables, unsupported, lending_params(body)
            forced = {"structured_outputs": offer.structure} if offer and offer.structure else {}
            most = default if most_asked is None else most_asked
            params = body.params(served.sampling, logprobs=body.shown, max_tokens=most, **forced)
            return offer, variables, unsupported, params

        offer, variables, unsupported, params = await state.run_by_size(request, deadline, resolve)
        unsupported += untold(body.tools, body.tool_choice, told=served.told)
        ignored = [*(names.get(name, name) for name in unsupported), *body.ignored, *ignored]
        request["headers"] |= state.ignored.headers(ignored)
        forced = offer and offer.structure
        constraint = (
            "tools" if forced else "response_format" if body.response_format else "structured_outputs"
        )
        names = chained({"prompt": "messages", **ASKED[constraint]}, names)
    caller, kept_s = request["caller"], body.keep_alive_s
    with (
        naming(names),
        _notifying_readers(state, transfer),
        state.under_way(served, params.n, deadline, caller=caller, keep_alive_s=kept_s) as places,
    ):
        async with deadline.held():
            await served.ready()
            messages, opened = body.messages, body.add_generation_prompt
            ids, thinking = await served.encode_chat(messages, variables, request["turn"], answer=opened)
            marks = await served.marks(ids, messages, variables, request["turn"])
            updates: dict[str, Any] = {"cache_marks": marks or None}
            if thinking and not is_lending and (budget or params.structured_outputs):
                updates["thinking"] = span_of(thinking, budget[1] if budget else None)
            elif budget and not thinking:
                request["headers"] |= state.ignored.headers([names.get(budget[0], budget[0]), *ignored])
            if most_asked is None and not is_lending:
                most = served.engine.model.settings.max_model_len
                updates["max_tokens"] = max(min(default, most - len(ids)), 1)
            params = params.model_copy(update=updates)
            prepared = await served.prepare([ids], params, request["tenant"])
            _check_size(state, served, prepared, "top_logprobs")
            await _fetch(state, prepared, transfer)
        writer = write(ExpectedContent(thinking, offer, body.include_reasoning), prepared)
        if thinking and (tokenizer := served.engine.tokenizer):
            writer.usage.thinking = ThinkingTokens(thinking, tokenizer)
        return await _answer(
            request, state, served, prepared, writer, deadline, places, names, transfer, streams=body.stream
        )


def template_settings(
    body: ChatBody, offer: ToolOffer | None, served: ServedModel
) -> tuple[dict[str, Any], list[str]]:
    """Return the template's variables besides the messages, and fields that it has no variables for."""
    variables, unsupported = template_variables(body, served.template, served.template_kwargs)
    return variables | ({"tools": offer.plain} if offer else {}), unsupported


def _notifying_readers(state: ServerState, transfer: Asked | None) -> AbstractContextManager[None]:
    """Notify a server waiting for this prompt at once if it is not prefilled."""
    return state.reach.lender.notifying_readers(transfer) if state.reach else nullcontext()


async def _fetch(state: ServerState, prepared: Sequence[PreparedPrompt], transfer: Asked | None) -> None:
    """Fetch prefixes prefilled by another server, if requested; they become cached prefixes here."""
    if transfer is not None:
        assert state.reach
        await state.reach.fetch(prepared, transfer)


def _check_size(
    state: ServerState, served: ServedModel, prepared: Sequence[PreparedPrompt], top: str
) -> None:
    max_model_len = served.engine.model.settings.max_model_len
    check_size(prepared, max_model_len, state.config.max_answer_values, top=top)


async def _answer(
    request: web.Request,
    state: ServerState,
    served: ServedModel,
    prepared: Sequence[PreparedPrompt],
    writer: AnswerWriter,
    deadline: RequestDeadline,
    places: QueueSlots,
    names: Names,
    asked: Asked | None,
    *,
    streams: bool,
) -> web.StreamResponse:
    stall_s, metrics, resident = state.config.stall_timeout, served.metrics, served.resident
    available = served.engine.model.settings.max_model_len - max(len(prompt.ids) for prompt in prepared)
    request["headers"][MAX_TOKENS] = str(min(prepared[0].params.max_tokens, available))
    answers: Answers | Lending
    if isinstance(asked, LendFields):
        assert state.reach
        assert isinstance(writer, Chunks), "other APIs do not report this"
        answers = Lending(state.reach.lender, prepared, asked, deadline, writer)
    else:

        def over() -> None:
            resident.note_over()
            places.let_go()

        answers = Answers(
            served.engine, state.bell, prepared, streams=streams, deadline=deadline, on_over=over
        )
    work: Work = partial(served.work, caller=request["turn"])
    with resident.answering(answers):
        with metrics.request(prepared, deadline.start_s) as watch, answers:
            if isinstance(answers, Answers):
                places.hold()
            if streams:
                stream = EventStream(request, stall_s, is_typed=writer.is_typed)
                return await _stream(answers, writer, watch, stream, names, work)
            outputs = await _gather(answers, writer, watch)
        encode = partial(work, LONG + 1) if outputs.size * SPELLING > LONG else None
        return await send_pieces(request, writer.whole(outputs), stall_s, encode)


class OutputCollector(Mapping[int, Delta]):
    """Output of each choice; a look-up assembles it."""

    def __init__(self) -> None:
        self._outputs: dict[int, CollectedOutput] = {}
        self.size = 0
        """Number of tokens reported."""

    def add(self, choice: int, delta: Delta) -> None:
        """Append a choice's next delta."""
        self.size += delta.num_reported
        self._outputs.setdefault(choice, CollectedOutput()).add(delta)

    def __getitem__(self, choice: int) -> Delta:
        return self._outputs[choice].delta()

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._outputs))

    def __len__(self) -> int:
        return len(self._outputs)


async def _gather(answers: Answers | Lending, writer: AnswerWriter, watch: RequestTracker) -> OutputCollector:
    outputs = OutputCollector()
    async for output in answers:
        writer.usage.add(output.choice, output.delta)
        watch.said(output)
        outputs.add(output.choice, output.delta)
        await asyncio.sleep(0)  # all choices may have arrived at once
    return outputs


async def _stream(
    answers: Answers | Lending,
    writer: AnswerWriter,
    watch: RequestTracker,
    stream: EventStream,
    names: Names,
    work: Work,
) -> web.StreamResponse:
    """Stream the deltas. After the first event an error becomes an event, as the status has been sent."""
    try:
        async for output in answers:
            choice, delta, _ = output
            writer.usage.add(choice, delta)
            watch.said(output)

            def frame(choice: int = choice, delta: Delta = delta) -> bytes:
                return stream.framed(writer.events(choice, delta))

            if data := await work(delta.num_reported * SPELLING, frame):
                await stream.send(data)
        if events := writer.end():
            await stream.send(stream.framed(events))
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
        await stream.send(stream.framed(writer.failed(failure)))
    return await stream.end()


def _shown(body: RequestBody) -> ShownFields:
    scored = body.prompt_logprobs is not None
    return ShownFields(body.return_token_ids, body.return_origins, body.return_drafts, scored)
