"""EngineCore: add, step and abort requests, in the one thread that owns the model."""

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import SOLE, Tenant
from specdec.core.loop import DecodeLoop
from specdec.core.outputs import Delta, EngineStats
from specdec.core.params import find_stops
from specdec.core.request import Emit, Request
from specdec.errors import EngineError, SpecdecError
from specdec.state_slots.slots import RequestId
from specdec.text.tokenizer import TextStream
from specdec.verify.limits import TokenLimit
from specdec.verify.sampler import TokenSampler


def discard(_: Delta | SpecdecError) -> None:
    """Discard a request's output."""


class EngineCore:
    """A decode loop and its requests. `new_request` may be called from any thread."""

    def __init__(self, loop: DecodeLoop, *, vocab: int, eos: Collection[int], max_length: int) -> None:
        self.loop, self.vocab, self.eos, self.max_length = loop, vocab, eos, max_length
        self.failed_steps = 0
        """Number of steps that raised and were recovered."""
        self.clean_checks = 0
        """Number of idle checks of the arena that passed."""
        self._numbers = itertools.count(1)

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        emit: Emit = discard,
        limits: Sequence[TokenLimit] = (),
        text: TextStream | None = None,
        stop_ids: Mapping[int, int | None] | None = None,
        index: int = 0,
        tenant: Tenant = SOLE,
        prefill_only: bool = False,
        turns: Sequence[int] | None = None,
    ) -> Request:
        """Build a request for choice `index`; `stop_ids` defaults to those of the parameters and EOS.

        `turns` is the result of `turns_of`, for all choices of a prompt. With `prefill_only` the request
        prefills for another engine and samples nothing.
        """
        request = Request(
            RequestId(next(self._numbers)),
            prompt,
            params,
            chooser=TokenSampler(params, seed=seed, prompt=prompt, vocab=self.vocab, limits=limits),
            text=text,
            stop_ids=find_stops(params, self.eos) if stop_ids is None else stop_ids,
            max_length=self.max_length,
            emit=emit,
            index=index,
            synthetic=self.loop.speculation.synthetic is not None,
            tenant=tenant,
        )
        request.is_prefill_only = prefill_only
        request.turns = self.turns_of(prompt) if turns is None else turns
        return request

    def turns_of(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the lengths at which the first and the last turn of a chat end, each with an EOS token."""
        ends = np.flatnonzero(np.isin(np.asarray(prompt, np.int64), list(self.eos))) + 1
        return (int(ends[0]), int(ends[-1])) if len(ends) else ()

    def add_request(self, request: Request) -> Request:
        """Submit a request; it joins the first step with capacity for it."""
        self.loop.scheduler.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """Cancel a request at the next step; no effect if it has ended."""
        request.cancelled = True

    @property
    def has_work(self) -> bool:
        return self.loop.scheduler.has_work

    @property
    def requests(self) -> list[Request]:
        """Return running and waiting requests."""
        return [*self.loop.scheduler.running, *self.loop.scheduler.waiting]

    def step(self) -> None:
        """Advance every scheduled request by one window."""
        self.loop.step()

    def prepare(self) -> bool:
        """Record one step before its first use, while no request runs; return False when none is left."""
        return self.loop.prepare()

    def warm_up(self) -> None:
        """Record all remaining steps; call it before measuring speed."""
        while self.prepare():
            pass

    def run_until_idle(self) -> None:
        """Step until every request has ended."""
        while self.has_work:
            self.step()

    def check_may_rest(self) -> None:
        """Raise if another engine is writing into the arena, which then must not be released."""
        if self.loop.scheduler.connector.is_receiving:
            raise EngineError(
                "Prompts are being fetched into this engine's arena; retry when they have arrived."
            )

    def rest(self) -> None:
        """Preempt running requests and release the arena's memory; requests wait until `wake`."""
        self.loop.rest()

    def wake(self) -> None:
        """Use the arena again and resume waiting requests."""
        self.loop.wake()

    def check_idle(self) -> None:
        """Check the arena's integrity while idle."""
        self.loop.check_idle()
        self.clean_checks += 1

    def recover(self, failure: Exception) -> None:
        """Reset after a failed step, and end the requests it may have corrupted with an error."""
        failed = self.loop.scheduler.give_up()
        try:
            self.loop.recover()
            self.failed_steps += 1
        finally:
            text = f"The engine failed while this request ran: {failure!r}."
            for request in failed:
                if request.finish_reason and not request.chooser.fault:  # its text is complete
                    request.send(request.take_delta())
                else:
                    request.fail(EngineError(text))  # one instance per request, since a caller may modify it

    def end_all(self, text: str) -> Sequence[Exception]:
        """Release every request and end it with an error; return exceptions raised meanwhile."""
        faults = []
        for request in self.requests:
            try:
                self.loop.scheduler.release(request)
            except Exception as fault:  # continue with the other requests
                faults.append(fault)
            request.fail(EngineError(text))
        return faults

    def flush(self, caller: str | None = None) -> None:
        """Drop data cached from ended requests: all, or one caller's."""
        self.loop.flush(caller)

    def close(self) -> None:
        """Stop background threads of the loop, and other ranks."""
        self.loop.close()
        self.loop.executor.close()

    def stats(self) -> EngineStats:
        """Return statistics since the start, and current usage; callable from any thread."""
        loop = self.loop
        counts, scheduler = loop.counts, loop.scheduler
        return EngineStats(
            steps=counts.steps,
            tokens=counts.tokens,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_length=counts.acceptance_length,
            per_depth=counts.per_depth,
            histogram=dict(sorted(counts.histogram.copy().items())),
            by_context=counts.by_context(),
            seconds=dict(counts.seconds),
            synthetic=loop.speculation.synthetic is not None,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            limited_by=dict(scheduler.limited_by),
            arena=loop.arena.usage(),
            device_steps=loop.runner.steps if loop.runner else 0,
            host_steps=dict(+loop.runner.refusals) if loop.runner else {},
            failed_steps=self.failed_steps,
            clean_checks=self.clean_checks,
            moved_blocks=loop.arena.moved_blocks,
            prefixes=loop.prefixes.stats() if loop.prefixes else None,
            speculation=loop.outlook,
        )
