"""State shared by all handlers: the engine, access, and the requests in progress."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import Tenant
from specdec.core.params import PreparedPrompt
from specdec.engine.engine import SpecEngine
from specdec.engine.prompts import Prompt
from specdec.errors import RequestError
from specdec.models.folder import SHIPPED
from specdec.server.access import Access
from specdec.server.answers import RequestDeadline, StreamWaker
from specdec.server.connections import Connections
from specdec.server.failures import Failure, Panic, without_inside, without_panics
from specdec.server.fields import IgnoredFields
from specdec.server.messages import ChatMessage, as_read, beginnings
from specdec.server.metrics import Metrics, ModelMetrics, labels_of
from specdec.server.reach.figures import ReachFigures
from specdec.server.reach.reach import Reach
from specdec.server.receive import ARRIVING_BYTES, BodyBudget, read_body
from specdec.server.resident import Resident
from specdec.server.responses.store import ResponseStore
from specdec.server.settings import Role, ServerConfig
from specdec.server.switcher import Switcher
from specdec.server.threads import LONG_S, ThreadPool
from specdec.server.turns import Turns
from specdec.text.answers.formats import CALL_FORMATS, call_format
from specdec.text.answers.thinking import THINKING_FORMATS, ThinkingFormat, thinking_format
from specdec.text.chat_template import LONGEST_ANSWER, load_template
from specdec.text.generation_config import longest_answer, sampling_defaults
from specdec.text.grammar.guide import CompiledGrammar

logger = logging.getLogger(__name__)

BUSY = {"Retry-After": "1"}
LONG = 20_000
"""Characters of an answer that take long to encode."""
LONG_TEXT = 4096
"""Characters or ids of prompts that take milliseconds to tokenise: as many emoji some 9 ms on a Xeon."""
LARGE = 4096
"""Bytes of a body that takes milliseconds to parse: it may hold a hundred messages."""
KEPT_BYTES = 384 << 20
"""Memory for parsed bodies, counted in bytes of JSON, until their requests end; one caller gets half."""
T = TypeVar("T")
STALLED_S = 10.0
"""Seconds of a step after which readiness fails, well before step_timeout."""
STOPPING = {"Retry-After": "10"}


class EncodedChat(NamedTuple):
    """A rendered and tokenised chat."""

    ids: list[int]
    thinking: ThinkingFormat | None
    """Thinking format of its answer, if any."""


class ServerState:
    """Shared state. Owned by the event loop's thread."""

    def __init__(
        self,
        switcher: Switcher,
        config: ServerConfig,
        reach: Reach | None = None,
        access: Access | None = None,
    ) -> None:
        self.switcher, self.config = switcher, config
        self.reach = reach
        """Lending and fetching; None: the server has no role."""
        self.metrics = Metrics(switcher.residents)
        if reach:
            self.metrics.registry.register(ReachFigures(reach, labels_of(switcher.residents[0].name)))
        self.access = access or Access(config)
        pauses = not self.access.is_for_one
        self.served = [
            ServedModel(resident, config, self.metrics.of(resident.name), pauses=pauses)
            for resident in switcher.residents
        ]
        """The models; requests without a name use the first."""
        self.ignored = IgnoredFields()
        self.bell = StreamWaker(asyncio.get_running_loop())
        self.turns = Turns(alone=self.access.is_for_one)
        self.connections = Connections(config.max_connections, config.idle_timeout)
        self.arriving = BodyBudget(ARRIVING_BYTES, config.max_body_bytes)
        self.kept = BodyBudget(KEPT_BYTES, config.max_body_bytes)
        """Budgets for bodies; without keys each address is a caller."""
        self.responses = ResponseStore(
            config.max_stored_responses, config.stored_responses_bytes, config.stored_responses_seconds
        )
        self._readers = ThreadPool("reading", config.max_queued, pauses=pauses)
        self.draining = False
        self._under_way: set[RequestDeadline] = set()
        self._read: set[RequestDeadline] = set()
        """Deadlines of requests whose bodies are being parsed or wait for it."""
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def role(self) -> Role | None:
        return self.reach.role if self.reach else None

    @property
    def names(self) -> list[str]:
        return [name for model in self.served for name in model.names]

    @property
    def choices(self) -> int:
        """Number of choices in progress, over all models."""
        return sum(model.num_choices for model in self.served)

    @property
    def engines(self) -> list[SpecEngine]:
        """Engines of the loaded models."""
        return [resident.engine for resident in self.switcher.residents if resident.engine]

    def named(self, name: str | None) -> "ServedModel":
        """Return the model of this name, the first one if None; raise if unknown."""
        if name is None:
            return self.served[0]
        for model in self.served:
            if name in model.names:
                return model
        raise Failure(
            404,
            f"model: {name!r:.80} is not served here; use {' or '.join(map(repr, self.names))}.",
            param="model",
            code="model_not_found",
        )

    async def read(self, request: web.Request, deadline: RequestDeadline, read: Callable[[bytes], T]) -> T:
        """Receive and parse a request's body, in a thread if large."""
        with self.arriving.holding(request["kept"].caller) as budget:
            body = await read_body(request, budget, self.config.body_timeout)

            def parse() -> tuple[T, int]:
                data = body.unpack()
                return read(data), len(data)

            request["body_bytes"] = len(body.data)
            more_bytes = LARGE if body.is_packed else 0
            parsed, request["body_bytes"] = await self.run_by_size(request, deadline, parse, more_bytes)
        request["kept"].add(request["body_bytes"])
        return parsed

    async def run_by_size(
        self, request: web.Request, deadline: RequestDeadline, work: Callable[[], T], more_bytes: int = 0
    ) -> T:
        """Run work whose cost depends on the body's size, in the caller's turn and in a thread if large."""
        if request["body_bytes"] + more_bytes <= LARGE:
            return work()
        if self.draining and deadline not in self._under_way:
            raise _stopping()  # it would be refused after parsing
        self._read.add(deadline)
        try:
            async with deadline.held():
                return await self._readers.do(work, request["turn"])
        finally:
            self._read.discard(deadline)

    @contextlib.contextmanager
    def under_way(
        self,
        served: "ServedModel",
        choices: int,
        deadline: RequestDeadline,
        *,
        caller: str,
        field: str = "n",
        keep_alive_s: float | None = None,
    ) -> "Iterator[QueueSlots]":
        """Admit a request, or raise, naming `field`, if too many choices are in progress."""
        if self.draining:
            raise _stopping()
        most = self.config.max_queued
        if choices > (allowed := self.access.max_choices(caller, most)):
            raise Failure(
                400,
                f"{field}: {choices} choices are more than the {allowed} that "
                f"{'this key' if caller else 'requests'} may have in flight; ask for fewer.",
                param=field,
            )
        in_flight = served.choices[caller]
        allowed = self.access.max_choices(caller, most - (served.num_choices - in_flight))
        if served.num_choices + choices > most or in_flight + choices > allowed:
            key = f"; {in_flight} of them are this key's, which may have {allowed} now" if caller else ""
            raise Failure(
                429,
                f"{served.num_choices} of at most {most} choices of {served.name} are in flight{key}; try "
                "again later.",
                code="too_many_requests",
                headers=BUSY,
            )
        if self.reach and keep_alive_s is not None:
            raise Failure(
                400,
                "keep_alive: other servers read this one's memory, so its model stays loaded; leave it out.",
                param="keep_alive",
            )
        served.resident.enter(keep_alive_s, caller)
        served.choices[caller] += choices
        self.idle.clear()
        self._under_way.add(deadline)

        def release() -> None:
            served.choices -= Counter({caller: choices})
            if not self.choices:
                self.idle.set()

        places = QueueSlots(release)
        try:
            yield places
        finally:
            served.resident.leave(keep_alive_s, caller)
            self._under_way.discard(deadline)
            places.let_go()

    def drain(self) -> None:
        """Refuse new requests, including those still being parsed."""
        self.draining = True
        for deadline in self._read - self._under_way:
            deadline.end(_stopping())

    def end_all(self) -> None:
        """Fail all requests in progress, for shutdown."""
        for deadline in list(self._under_way):
            deadline.end(Failure(503, "The server is stopping.", code="stopping", headers=STOPPING))


def _stopping() -> Failure:
    return Failure(503, "The server is stopping; use another one.", code="stopping", headers=STOPPING)


class QueueSlots:
    """A request's part of `max_queued`, until its handler and the engine are done with it.

    Otherwise a client that disconnects at once could submit without limit.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release, self._holders = release, 1

    def hold(self) -> None:
        """Add a holder."""
        self._holders += 1

    def let_go(self) -> None:
        """Release them after the last holder."""
        self._holders -= 1
        if not self._holders:
            self._release()


class ServedModel:
    """One model for requests: engine, names, template and metrics."""

    def __init__(
        self, resident: Resident, config: ServerConfig, metrics: ModelMetrics, *, pauses: bool
    ) -> None:
        """With `pauses`, callers pause after long work."""
        self.resident, self.config, self.metrics = resident, config, metrics
        self.names, folder = resident.names, resident.folder
        self.choices = Counter[str]()
        """Choices in progress by caller."""
        self.template = load_template(folder)
        self.calls = call_format(config.tool_call_parser, self.template)
        """The model's tool call format, if it has one."""
        self.thinking = thinking_format(config.reasoning_parser, self.template)
        """The model's thinking markers, if any."""
        self.told = config.tool_call_parser == "none" or self.template.takes("tools")
        """Whether the template takes tools, or all are refused; otherwise chats ignore them."""
        parsers = ", ".join(f"{kind}: {name or 'none'}" for kind, name in self.parsers.items())
        note = "" if self.told else "; chats ignore tools, as the chat template does not support them"
        logger.info("%s: %s%s", self.name, parsers, note)
        self.template_kwargs = config.template_kwargs
        is_shipped = folder in {path.resolve() for path in SHIPPED.values()}
        self.writes = "completions" if is_shipped or self.template.is_plain else "chats"
        """The playground's default mode; `tiny` has a chat template but only completes code."""
        self._longest = config.default_max_tokens or longest_answer(folder) or LONGEST_ANSWER
        self.sampling = sampling_defaults(folder) if config.sampling_defaults == "model" else {}
        """Values of sampling parameters that a request does not give."""
        self._templates = ThreadPool("template", config.max_queued, pauses=pauses)
        self._workers = ThreadPool("text", config.max_queued, pauses=pauses)
        self._is_slow = False
        """Whether a short text took long to tokenise."""
        self._marks_refused = False
        """Whether an ignored mark was logged."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parsers(self) -> dict[str, str | None]:
        """Return the names of the formats in use of tool calls and thinking, by setting."""
        calls = next((name for name, format in CALL_FORMATS.items() if format is self.calls), None)
        thinking = next((name for name, format in THINKING_FORMATS.items() if format == self.thinking), None)
        return {"tool_call_parser": calls, "reasoning_parser": thinking}

    @property
    def num_choices(self) -> int:
        return self.choices.total()

    @property
    def engine(self) -> SpecEngine:
        """The engine of a loaded model; it stays loaded during a request that was ready."""
        assert self.resident.engine, "the model is not loaded"
        return self.resident.engine

    @property
    def max_model_len(self) -> int | None:
        """Maximum sequence length; None: never loaded."""
        return self.resident.max_model_len

    @property
    def default_max_tokens(self) -> int:
        return min(self._longest, self.max_model_len or self._longest)

    async def ready(self) -> None:
        """Wait until the model is loaded; raise if it is not, or refuses requests."""
        await self.resident.ready()
        self.check_engine()

    def check_step(self) -> None:
        """Raise if the current step has been running for too long."""
        engine = self.resident.engine
        took_s, most_s = engine.step_seconds if engine else 0.0, min(STALLED_S, self.config.step_timeout / 2)
        if took_s > most_s:
            raise Failure(
                503,
                f"The current step has taken {took_s:.1f} s; it counts as stalled after {most_s:g} s. "
                "Requests wait for it.",
                code="stalled",
                headers=BUSY,
            )

    def check_engine(self) -> None:
        """Raise if the engine has failed for good."""
        if fault := self.resident.fault:
            raise Failure(503, without_inside(fault), code="engine_error", headers=STOPPING)

    async def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams, tenant: Tenant
    ) -> list[PreparedPrompt]:
        """Validate all prompts before one starts, so that an error in the last wastes no work."""
        if self.config.log_prompts:
            logger.info("prompts: %r", prompts)

        grammar: CompiledGrammar | None = None
        if compiling := self.engine.compile_grammar(params, tenant=tenant):
            grammar = await asyncio.wrap_future(compiling)

        def prepare() -> list[PreparedPrompt]:
            terms = self.engine.read_terms(params, grammar, tenant=tenant)
            return [self.engine.read_prompt(prompt, terms) for prompt in prompts]

        with _tokenizing():
            return await self._tokenize(sum(map(len, prompts)) + _size(params), prepare, tenant.flow[0])

    async def work(self, size: int, work: Callable[[], T], caller: str) -> T:
        """Run work of a size in characters; long work runs in a thread, in its caller's turn."""
        with without_panics():
            return await self._workers.do(work, caller) if size > LONG else work()

    async def _tokenize(self, size: int, work: Callable[[], T], caller: str) -> T:
        """Run tokenisation, in a thread if the text is long, or once a short one has taken long.

        A tokenizer's regex may backtrack for a second over 40 characters.
        """
        if size > LONG_TEXT or self._is_slow:
            return await self.work(LONG + 1, work, caller)
        start_s = time.thread_time()
        try:
            return await self.work(0, work, caller)
        finally:
            self._is_slow = time.thread_time() - start_s > LONG_S

    async def encode(self, text: str, caller: str, *, special: bool = True) -> list[int]:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise Failure(400, "prompt: the model has no tokenizer; send token ids.", param="prompt")
        try:
            with _tokenizing():
                encode = partial(tokenizer.encode, text, special=special)
                return await self._tokenize(len(text), encode, caller)
        except (UnicodeError, TypeError):
            raise Failure(400, "prompt: it is not valid Unicode text.", param="prompt") from None

    def check_turns(self, count: int) -> None:
        """Raise for more turns than the context has tokens, before converting and rendering them."""
        max_model_len = self.resident.max_model_len
        if max_model_len and count > max_model_len:
            raise Failure(
                400,
                f"messages: {count:,} turns do not fit into {max_model_len:,} tokens, the max_model_len; "
                "give fewer.",
                param="messages",
                code="context_length_exceeded",
            )

    async def encode_chat(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any], caller: str, *, answer: bool
    ) -> EncodedChat:
        """Render a chat with the model's template and tokenise it."""

        def render() -> str:
            plain = as_read(messages)
            self.template.check_roles(plain)
            return self.template.render(plain, variables, answer=answer)

        text = await self._templates.do(render, caller)
        self.engine.check_length(text)
        ids = await self.encode(text, caller, special=self.template.is_plain)
        return EncodedChat(ids, self.thinking.after(text) if self.thinking else None)

    async def marks(
        self, ids: Sequence[int], messages: Sequence[ChatMessage], variables: Mapping[str, Any], caller: str
    ) -> list[int]:
        """Return the shared prefix length in tokens of each marked chat prefix."""

        def render() -> list[str]:
            texts = (self._begun(plain, variables) for plain in beginnings(messages))
            return [text for text in texts if text is not None]

        lengths = []
        for text in await self._templates.do(render, caller):
            prefix_ids = await self.encode(text, caller, special=self.template.is_plain)
            pairs = zip(prefix_ids, ids, strict=False)
            lengths.append(
                next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prefix_ids), len(ids)))
            )
        return [mark for mark in lengths if mark]

    def _begun(self, plain: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str | None:
        """Render a chat prefix; None: some templates refuse partial chats."""
        try:
            text = self.template.render(plain, variables, answer=False)
            self.engine.check_length(text)
        except RequestError:
            if not self._marks_refused:
                self._marks_refused = True
                logger.info("the chat template refuses part of a chat: its cache_control mark is ignored")
            return None
        return text


def _size(params: SamplingParams) -> int:
    """Return the number of ids and characters in the parameters, without prompts."""
    ids = len(params.allowed_token_ids or ()) + len(params.stop_token_ids or ())
    grammar = len(params.structured_outputs.source) if params.structured_outputs else 0
    return ids + grammar + sum(map(len, params.bad_words or ()))


@contextlib.contextmanager
def _tokenizing() -> Iterator[None]:
    """Convert a tokenizer's panic, as on texts its regex cannot split, to a client error."""
    try:
        yield
    except Panic as error:
        logger.warning("the tokenizer failed: %s", type(error.__cause__).__name__)
        raise Failure(
            400, "prompt: the model's tokenizer fails on this text; change or shorten it.", param="prompt"
        ) from None
