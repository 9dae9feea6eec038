"""What stands between the loop and the prefixes that are kept: what a request shares, and its states."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from specdec.core.batch import Ahead, ScheduledRequest
from specdec.core.executor import Executor
from specdec.core.head_state import HeadState
from specdec.core.outputs import PrefixStats
from specdec.core.request import Request
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import Node
from specdec.state_slots.prefix.tuner import Tuner

FEWEST = 64
"""Tokens of a step that measure the speed of prefill, at least."""


class Prefixes:
    """Tells the cache what requests have read. The head has read as far as any state that is kept."""

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
        """Share what prompts have been read of, and keep the states that were to be kept on the way."""
        reading = [row.request for row in rows if row.request.lease and not row.is_decode]
        # Later requests share these blocks: the head must have read as far.
        self.head_state.read_on(reading)
        for request in reading:
            node = self._share(request, request.num_computed_tokens)
            if request.lease and request.committed:
                hidden_1D = self.head_state.last_hidden(request)
                self.cache.keep_chunk(request.lease, node, request.committed.state, hidden_1D)

    def cut(self, request: Request) -> None:
        """Keep nothing of a request whose numbers were wrong, nor what it has gone on from."""
        if request.lease:
            self.cache.cut(request.lease, 0)

    def observe(self, rows: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn from a step that did nothing but prefill how long that takes.

        A step of few tokens takes as long as its weights take to load, which says nothing of a long one.
        """
        if sum(row.num_tokens for row in rows) < FEWEST:
            return
        work = self.cache.score.work
        read = ((row.request.num_computed_tokens, row.num_tokens) for row in rows)
        self.cache.rates.observe_reading(sum(work(end) - work(end - own) for end, own in read), seconds)

    def keep(self, ended: Sequence[Request], ahead: Ahead | None) -> None:
        """Keep what ended requests have read, and their states, for those that begin alike."""
        done = [self._left(r, ahead) for r in ended if r.lease and r.finish_reason]
        self._keep(done, ahead)
        for left in done:
            self._learn(left.request)

    def keep_running(self, running: Sequence[Request]) -> None:
        """Keep what requests have read that are about to be preempted or dropped, for later ones.

        Their states are the tree's from now on: they must not run any more. What no token has come of was
        never seen to give numbers, and is left out.
        """
        self._keep([self._left(r, None) for r in running if r.lease and r.first_token_s], None)

    def _keep(self, done: list["Left"], ahead: Ahead | None) -> None:
        # A node without a state grows with a text that goes on from it: the longest comes first.
        done.sort(key=lambda left: -left.length)
        if ahead is None:
            # Later requests share these blocks: the head must have read as far.
            read = self.head_state.read_ended([(left.request, left.skipped) for left in done])
            done = [left for left in done if left.request.number in read]
        nodes = [self._share(left.request, left.length) for left in done]
        kept = [
            (left, left.committed, node)
            for left, node in zip(done, nodes, strict=True)
            if left.committed and node.state is None and left.skipped <= len(left.committed.path)
        ]
        accepted = [Committed(c.state, c.path[: len(c.path) - left.skipped]) for left, c, _ in kept]
        self._fold([own for own in accepted if own.path])
        for left, committed, node in kept:
            hidden_1D = self.head_state.last_hidden(left.request) if ahead is None else None
            self.cache.keep(node, left.request.number, committed.state, hidden_1D)

    def _left(self, request: Request, ahead: Ahead | None) -> "Left":
        """Return what an ended request leaves, once the steps under way have run.

        The last token was not read, but by a device that was ahead. A stop may have cut some off.
        """
        committed, computed = request.committed, request.num_computed_tokens
        if ahead and ahead.steps:
            committed, computed = committed and Committed(committed.state), computed + ahead.tokens
        length = min(computed, len(request.tokens) - (ahead is None))
        return Left(request, committed, length, computed - length)

    def _learn(self, request: Request) -> None:
        """Record a request for the tuner to replay.

        It starts with the first request: an interrupt while the engine is built would meet its new thread.
        """
        if self.tuner and request.lease:
            self.tuner.start()
            count = request.prompt_length
            self.tuner.observe(request.tokens[:count], request.tokens[count:], request.lease.tenant)

    def stats(self) -> PrefixStats:
        """Return what was saved; any thread may ask. What is used and kept as well counts as used."""
        kept, alpha = self.arena.usage().kept_bytes, self.cache.score.alpha
        return PrefixStats(**asdict(self.cache.counts), cached_bytes=kept, alpha=alpha)

    def _share(self, request: Request, length: int) -> Node:
        assert request.lease
        return self.cache.note(request.lease, request.tokens[:length], request.table_N.tolist())

    def _fold(self, committed: Sequence[Committed]) -> None:
        """Bring states up to date with what was accepted."""
        if committed:
            self.executor.fold(committed)


class Left(NamedTuple):
    """What an ended request leaves for others."""

    request: Request
    committed: Committed | None
    length: int
    """Tokens that it has read and taken."""
    skipped: int
    """Tokens that it has read and not taken."""
