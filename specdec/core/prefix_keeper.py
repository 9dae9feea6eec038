"""Connects the decode loop and the prefix cache: shared blocks and cached states."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from specdec.core.batch import InFlightSteps, ScheduledRequest
from specdec.core.executor import Executor
from specdec.core.head_state import HeadState
from specdec.core.outputs import PrefixStats
from specdec.core.request import Request
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import CommittedState
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import PrefixNode
from specdec.state_slots.prefix.tuner import Tuner

FEWEST = 64
"""Minimum tokens of a step used to measure prefill speed."""


class PrefixKeeper:
    """Inserts requests' computed tokens into the cache. The head has processed all cached tokens."""

    def __init__(
        self,
        cache: PrefixCache,
        executor: Executor,
        arena: Arena,
        head_state: HeadState,
        tuner: Tuner | None = None,
    ) -> None:
        self.cache, self.executor, self.arena = cache, executor, arena
        self.head_state, self.tuner = head_state, tuner

    def note(self, rows: Sequence[ScheduledRequest]) -> None:
        """Share the computed blocks of prompts, and cache the states at chunk boundaries."""
        reading = [row.request for row in rows if row.request.lease and not row.is_decode]
        # Later requests share these blocks, so the head must have processed them too.
        self.head_state.read_on(reading)
        for request in reading:
            node = self._share(request, request.num_computed_tokens)
            if request.lease and request.committed:
                hidden_1D = self.head_state.last_hidden(request)
                self.cache.keep_chunk(request.lease, node, request.committed.state, hidden_1D)

    def cut(self, request: Request) -> None:
        """Remove a request with NaN from the cache, including the prefix it started from."""
        if request.lease:
            self.cache.cut(request.lease, 0)

    def observe(self, rows: Sequence[ScheduledRequest], seconds: float) -> None:
        """Record the speed of a step that only prefills.

        Short steps are bound by loading weights, so they are not used.
        """
        if sum(row.num_tokens for row in rows) < FEWEST:
            return
        work = self.cache.score.work
        read = ((row.request.num_computed_tokens, row.num_tokens) for row in rows)
        self.cache.rates.observe_prefill(sum(work(end) - work(end - count) for end, count in read), seconds)

    def keep(self, ended: Sequence[Request], ahead: InFlightSteps | None) -> None:
        """Cache ended requests' tokens and states for later requests."""
        done = [self._left(r, ahead) for r in ended if r.lease and r.finish_reason]
        self._keep(done, ahead)
        for prefix in done:
            self._learn(prefix.request)

    def keep_running(self, running: Sequence[Request]) -> None:
        """Cache tokens and states of requests about to be preempted or dropped.

        Their states move to the cache, so they must not run any more. Requests without an output token are
        skipped, since their values were never checked for NaN.
        """
        self._keep([self._left(r, None) for r in running if r.lease and r.first_token_s], None)

    def _keep(self, done: list["FinishedPrefix"], ahead: InFlightSteps | None) -> None:
        # A node without a state is extended by a text that continues it, so the longest comes first.
        done.sort(key=lambda prefix: -prefix.length)
        if ahead is None:
            # Later requests share these blocks, so the head must have processed them too.
            read = self.head_state.read_ended([(prefix.request, prefix.skipped) for prefix in done])
            done = [prefix for prefix in done if prefix.request.number in read]
        nodes = [self._share(prefix.request, prefix.length) for prefix in done]
        kept = [
            (prefix, prefix.committed, node)
            for prefix, node in zip(done, nodes, strict=True)
            if prefix.committed and node.state is None and prefix.skipped <= len(prefix.committed.path)
        ]
        accepted = [CommittedState(c.state, c.path[: len(c.path) - prefix.skipped]) for prefix, c, _ in kept]
        self._fold([item for item in accepted if item.path])
        for prefix, committed, node in kept:
            hidden_1D = self.head_state.last_hidden(prefix.request) if ahead is None else None
            self.cache.keep(node, prefix.request.number, committed.state, hidden_1D)

    def _left(self, request: Request, ahead: InFlightSteps | None) -> "FinishedPrefix":
        """Return an ended request's computed tokens and state, once steps in flight have run.

        The last token is not computed unless the device was ahead. A stop may have dropped computed tokens.
        """
        committed, computed = request.committed, request.num_computed_tokens
        if ahead and ahead.steps:
            committed, computed = committed and CommittedState(committed.state), computed + ahead.tokens
        length = min(computed, len(request.tokens) - (ahead is None))
        return FinishedPrefix(request, committed, length, computed - length)

    def _learn(self, request: Request) -> None:
        """Record a request for the tuner to replay.

        The tuner starts with the first request: a KeyboardInterrupt during engine construction would
        otherwise hit its new thread.
        """
        if self.tuner and request.lease:
            self.tuner.start()
            count = request.prompt_length
            self.tuner.observe(request.tokens[:count], request.tokens[count:], request.lease.tenant)

    def stats(self) -> PrefixStats:
        """Return statistics; callable from any thread. Prefixes in use count as used, not as cached."""
        kept, alpha = self.arena.usage().cached_bytes, self.cache.score.alpha
        return PrefixStats(**asdict(self.cache.counts), cached_bytes=kept, alpha=alpha)

    def _share(self, request: Request, length: int) -> PrefixNode:
        assert request.lease
        return self.cache.note(request.lease, request.tokens[:length], request.table_N.tolist())

    def _fold(self, committed: Sequence[CommittedState]) -> None:
        if committed:
            self.executor.fold(committed)


class FinishedPrefix(NamedTuple):
    """The cacheable part of an ended request."""

    request: Request
    committed: CommittedState | None
    length: int
    """Number of computed and accepted tokens."""
    skipped: int
    """Number of computed but not accepted tokens."""
