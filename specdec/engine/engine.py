"""SpecEngine: synchronous and asyncio interface of one decode loop."""

import asyncio
import queue
import random
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.outputs import Completion, Delta, EngineStats, collect
from specdec.core.params import PreparedPrompt, ValidatedParams, check_ids, find_stops, make_limits
from specdec.core.request import Emit, Request
from specdec.core.thinking import ThinkingMarks, ThinkingRule
from specdec.engine.kv_transfer import build_connected
from specdec.engine.prompts import Prompt, as_batch, as_ids, broadcast, of_prompt
from specdec.engine.thread import Worker
from specdec.engine.transfers import Transfers
from specdec.errors import ConfigError, RequestError, SpecdecError
from specdec.models.folder import find_models
from specdec.setup.capabilities import check_request
from specdec.state_slots.slots import RequestId
from specdec.text.grammar.compiler import Grammars
from specdec.text.grammar.guide import CompiledGrammar, Guide
from specdec.text.stops import StopNode
from specdec.text.tokenizer import TextStream
from specdec.verify.limits import TokenLimit
from specdec.verify.sampler import choice_seed

MARKS = 8
"""Number of thinking marker pairs whose tokens are cached."""


class SpecEngine:
    """Serves one model. Thread-safe; one background thread owns the model.

    Use it as a context manager, or call `close()`: both end running requests.
    """

    def __init__(self, model: str | Path, config: EngineConfig | None = None, **fields: object) -> None:
        self.config = EngineConfig.of(config, fields)
        self._worker = Worker(partial(build_connected, *find_models(model, self.config)))
        self.model = self._worker.model
        self.tokenizer = self.model.tokenizer
        self.transfers = Transfers(self._worker, self.model)
        self._seeds = random.Random(self.config.seed)
        spec = self.model.network.spec
        self._grammars = Grammars(self.tokenizer, spec.vocab, spec.eos)
        self._marks = lru_cache(MARKS)(partial(ThinkingMarks, tokenizer=self.tokenizer, vocab=spec.vocab))
        # If the engine is dropped without being closed, end its thread, which would keep the model alive.
        self._finalizer = weakref.finalize(self, self._worker.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Complete one or many prompts; results are in order, with the choices of a prompt together.

        If a prompt fails while running, the others are completed, then its error is raised with all results
        as `completions`. `use_tqdm` shows a progress bar on stderr.
        """
        batch = as_batch(prompts)
        params_list = broadcast(params, len(batch))
        validated: dict[int, ValidatedParams] = {}
        prepared = []
        for index, (prompt, sampling) in enumerate(zip(batch, params_list, strict=True)):
            try:
                terms = validated[id(sampling)] = validated.get(id(sampling)) or self.read_terms(sampling)
                prepared.append(self.read_prompt(prompt, terms))
            except RequestError as error:
                raise error if len(batch) == 1 else of_prompt(index, error) from None
        inbox = queue.SimpleQueue[tuple[int, Delta | SpecdecError]]()
        ticket = self.submit(prepared, lambda *item: inbox.put(item))
        try:
            choices = [(prompt.ids, prompt.params.n) for prompt in prepared]
            return collect(choices, inbox, self.tokenizer, use_tqdm=use_tqdm)
        except BaseException:
            ticket.cancel()
            raise

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the request's deltas. Closing the iterator cancels the request."""
        (params,) = broadcast(params, 1)
        prepared = self.prepare(prompt, params)
        event_loop, inbox = asyncio.get_running_loop(), asyncio.Queue[Delta | SpecdecError]()

        def emit(prompt: int, delta: Delta | SpecdecError) -> None:
            event_loop.call_soon_threadsafe(inbox.put_nowait, delta)

        ticket = self.submit([prepared], emit)
        try:
            unfinished = prepared.params.n
            while unfinished:
                delta = await inbox.get()
                if isinstance(delta, SpecdecError):
                    raise delta
                unfinished -= delta.finish_reason is not None
                # Decoding a prompt's log-probabilities takes long, so it runs in another thread.
                has_logprobs = delta.prompt_logprobs is not None
                decode = partial(delta.decoded, self.tokenizer)
                yield await asyncio.to_thread(decode) if has_logprobs else decode()
        except BaseException:
            ticket.cancel()
            raise

    def warm_up(self) -> None:
        """Record all steps now that would otherwise be recorded while the engine idles; blocks until done."""
        self._worker.between_steps(self.model.core.warm_up).result()

    def prepare(self, prompt: Prompt, params: SamplingParams, *, tenant: Tenant = SOLE) -> PreparedPrompt:
        """Validate a prompt and its parameters for `submit`."""
        return self.read_prompt(prompt, self.read_terms(params, tenant=tenant))

    def read_terms(
        self, params: SamplingParams, grammar: CompiledGrammar | None = None, *, tenant: Tenant = SOLE
    ) -> ValidatedParams:
        """Validate parameters, once for all prompts that share them.

        `grammar` is the result of `compile_grammar`, if it was awaited. Parameters are validated again here:
        an unchecked value would fail a step with all its requests. `tenant` names the caller if a process
        serves several; its salt comes from the parameters.
        """
        spec = self.model.network.spec
        with self._worker.calling():  # pydantic and the tokenizer are Rust, limits use torch
            params = params.checked()
            check_ids(params, self.tokenizer, spec.vocab)
            check_request(params, synthetic=self.model.settings.synthetic is not None)
            stop_ids = find_stops(params, spec.eos)
            has_grammar = params.structured_outputs is not None
            limits = make_limits(params, stop_ids, self.tokenizer, spec.vocab, has_grammar=has_grammar)
            thinking = None
            if span := params.thinking:
                marks = self._marks(span.start, span.end)
                thinking = ThinkingRule(span, marks, stop_ids, has_grammar=has_grammar)
        if grammar is None and (compiling := self.compile_grammar(params, tenant=tenant)):
            grammar = compiling.result()
        return ValidatedParams(params, grammar, _salted(tenant, params), stop_ids, limits, thinking)

    def read_prompt(self, prompt: Prompt, terms: ValidatedParams) -> PreparedPrompt:
        """Tokenise a prompt and check that the model supports it."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt: the model's folder has no tokenizer.json; add it, or pass token ids instead of "
                    "text (specdec generate --prompt-ids).",
                    field="prompt",
                )
            self.check_length(prompt)
            with self._worker.calling():
                ids = self._tokenize(prompt)
        else:
            ids = as_ids(prompt)
        vocab, max_model_len = self.model.network.spec.vocab, self.model.settings.max_model_len
        if not ids:
            raise RequestError("prompt: it is empty; give at least one token.", field="prompt")
        invalid = [i for i in ids if not 0 <= i < vocab]
        if invalid:
            raise RequestError(
                f"prompt: token id {invalid[0]!r} is outside the vocabulary; use integers below {vocab}.",
                field="prompt",
            )
        if len(ids) >= max_model_len:
            raise RequestError(
                f"prompt: it has {len(ids)} tokens and max_model_len is {max_model_len}, which includes the "
                f"output; {self._longer()}.",
                field="prompt",
            )
        if beyond := [mark for mark in terms.params.cache_marks or () if mark > len(ids)]:
            raise RequestError(
                f"cache_marks: {beyond[0]} exceeds the prompt's {len(ids)} tokens; give lengths up to "
                "the prompt's.",
                field="cache_marks",
            )
        return PreparedPrompt(tuple(ids), terms)

    def start_grammar_process(self) -> None:
        """Start the grammar compiler process without waiting."""
        self._grammars.prepare()

    def stop_grammar_process(self) -> None:
        """Stop the compiler process and those of unused grammars; the next grammar starts them again."""
        self._grammars.release()

    def compile_grammar(
        self, params: SamplingParams, *, tenant: Tenant = SOLE
    ) -> "Future[CompiledGrammar] | None":
        """Start compiling the grammar of a structured output, if any; the result raises any error."""
        self._worker.check_process()
        wanted = params.structured_outputs
        return self._grammars.begin(wanted.kind, wanted.source, _salted(tenant, params)) if wanted else None

    def check_length(self, text: str) -> None:
        """Raise for input too long for any tokenisation, before spending time on it."""
        max_tokens = self.model.settings.max_model_len
        if self.tokenizer and len(text) > max_tokens * self.tokenizer.longest:
            raise RequestError(
                f"prompt: it has {len(text):,} characters, which "
                f"{max_tokens} tokens, the max_model_len, cannot hold; {self._longer()}.",
                field="prompt",
            )

    def submit(
        self, prepared: Sequence[PreparedPrompt], emit: Callable[[int, Delta | SpecdecError], None]
    ) -> "Ticket":
        """Submit all choices of some prompts in one step.

        `emit` is called in the engine thread with the prompt's index and each delta or an error. To stop
        early, cancel the ticket; `generate` and `stream` do so for their callers.
        """
        with self._worker.calling():
            return Ticket(self._begin(prepared, emit), self._worker)

    def flush(self) -> None:
        """Drop data cached from earlier requests: look-up texts and prefixes."""
        self.begin_flush().result()

    def begin_flush(self, caller: str | None = None) -> "Future[None]":
        """Flush between two steps: all data, or one caller's."""
        return self._worker.flush(caller)

    def rest(self) -> None:
        """Release the arena's memory until `wake`.

        Running requests are preempted, new ones wait, and all continue afterwards with unchanged text.
        Prefixes move to the host tier if there is one, or are dropped.
        """
        self.begin_rest().result()

    def begin_rest(self) -> "Future[None]":
        """Start `rest` between two steps."""
        if not self.model.loop.arena.can_rest:
            raise ConfigError(
                "device: only an engine on a CPU under Linux can release its arena for a while; close it "
                "instead.",
                field="device",
            )
        return self._worker.rest()

    def wake(self) -> None:
        """Continue after `rest`."""
        self.begin_wake().result()

    def begin_wake(self) -> "Future[None]":
        """Start `wake` between two steps."""
        return self._worker.wake()

    @property
    def is_catching_up(self) -> bool:
        """Whether requests preempted by `rest` are still being recomputed."""
        return self.model.loop.scheduler.is_catching_up

    @property
    def fault(self) -> str | None:
        """Reason why no request is accepted; None while the engine lives."""
        return self._worker.fault

    @property
    def step_seconds(self) -> float:
        """Seconds that the current step has taken so far, for a watchdog."""
        return self._worker.step_seconds

    def abandon(self, fault: str) -> None:
        """Abandon an engine whose step hangs: all requests end with this error, and new ones are refused.

        Its thread cannot be stopped from outside: end the process.
        """
        self._worker.abandon(fault)

    def stats(self) -> EngineStats:
        """Return statistics since the start, and current usage."""
        return self.model.core.stats()

    def close(self, timeout_s: float | None = None) -> bool:
        """End every request with an error and stop the thread; idempotent.

        Waits for the current step, at most `timeout_s`; returns False if the thread still runs. The model's
        memory is freed with the engine object.
        """
        ended = self._worker.close(timeout_s)
        self._grammars.close()
        if ended:
            self._finalizer.detach()
        return ended

    def __enter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _longer(self) -> str:
        """Return a hint how to admit a longer prompt: the model, a setting or the memory limits it."""
        settings, supported = self.model.settings, self.model.network.spec.max_length
        if settings.max_model_len == supported:
            return "the model supports no more: shorten the prompt"
        if self.config.max_model_len is not None:
            return f"shorten the prompt or raise max_model_len, up to {supported}"
        return (
            f"the {settings.memory_bytes:,} bytes of memory_bytes hold no more: shorten the prompt or raise "
            "memory_bytes"
        )

    def _tokenize(self, prompt: str) -> list[int]:
        assert self.tokenizer is not None
        try:
            return self.tokenizer.encode(prompt)
        except (UnicodeError, TypeError):
            raise RequestError(
                "prompt: it is no valid Unicode text; give bytes decoded as UTF-8, without surrogates.",
                field="prompt",
            ) from None

    def _begin(
        self, prepared: Sequence[PreparedPrompt], emit: Callable[[int, Delta | SpecdecError], None]
    ) -> list[RequestId]:
        """Submit the requests of some prompts and return their numbers.

        Only the engine thread keeps requests: they hold tensors, and another thread that dropped the last
        reference would enter C++ to free them, possibly during interpreter exit.
        """
        requests = [
            request
            for index, prompt in enumerate(prepared)
            for request in self._requests(prompt, partial(emit, index))
        ]
        ids = [request.number for request in requests]
        try:
            self._worker.submit(requests)
        except BaseException:
            requests.clear()  # the error's traceback keeps the list
            raise
        return ids

    def _requests(self, prepared: PreparedPrompt, emit: Emit) -> list[Request]:
        """Build one request per choice, each with its own seed."""
        prompt, params, terms = prepared.ids, prepared.params, prepared.terms
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        stops, turn_starts = StopNode.of(params.stop), self.model.core.turns_of(prompt)
        return [
            self.model.core.new_request(
                prompt,
                params,
                seed=choice_seed(seed, index),
                emit=emit,
                limits=self._limits(terms),
                text=self._text(params, stops),
                stop_ids=terms.stop_ids,
                index=index,
                tenant=terms.tenant,
                turns=turn_starts,
            )
            for index in range(params.n)
        ]

    def _text(self, params: SamplingParams, stops: StopNode) -> TextStream | None:
        """Return a choice's text stream, if there is a tokenizer."""
        if self.tokenizer is None:
            return None
        tokenizer = self.tokenizer if params.skip_special_tokens else self.tokenizer.with_special_tokens()
        return TextStream(tokenizer, stops, keeps_stop=params.include_stop_str_in_output)

    def _limits(self, terms: ValidatedParams) -> list[TokenLimit]:
        return terms.begin_limits(Guide(terms.grammar) if terms.grammar else None)


class Ticket:
    """Handle of requests submitted together."""

    def __init__(self, numbers: Collection[int], worker: Worker) -> None:
        self._numbers, self._worker = numbers, worker

    def cancel(self) -> None:
        """Cancel the requests that still run; thread-safe."""
        self._worker.cancel(self._numbers)


def _salted(tenant: Tenant, params: SamplingParams) -> Tenant:
    return replace(tenant, salt=params.cache_salt or "")
