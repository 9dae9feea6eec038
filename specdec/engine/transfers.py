"""Prompts that one engine reads for another: what is lent, and what is landing."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import Tenant
from specdec.core.outputs import Delta, RequestStats
from specdec.core.terms import Prepared
from specdec.engine.kv_transfer import KVTransfer, Lent
from specdec.engine.landing import Landing
from specdec.engine.thread import Worker
from specdec.errors import ConfigError, EngineError, SpecdecError
from specdec.setup.build import Model
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.cache import PrefixCache

T = TypeVar("T")


class Loan:
    """One prompt that is read to be lent. Any thread may hold it."""

    def __init__(self, lent: Lent, done: "Future[Lent]", give_back: Callable[[], None]) -> None:
        self.lent, self.done = lent, done
        """`done` gives it once the last of it is being read, or raises why it is not."""
        self.stats: RequestStats | None = None
        """What its steps did; None before it is done."""
        self.give_back = give_back
        """Stop the prefill, and release the memory between two steps; a second call does nothing."""


class Transfers:
    """An engine's side of transfers; any thread may call."""

    def __init__(self, worker: Worker, model: Model) -> None:
        self._worker, self._model = worker, model

    @property
    def arena(self) -> Arena:
        """The memory that other engines read from, and that this one fetches into."""
        return self._model.loop.arena

    def lend(self, prepared: Prepared, on_change: Callable[[Lent], None] | None = None) -> Loan:
        """Prefill a prompt, all but its last token, and keep its memory in place until it is given back.

        Of the prompt's parameters only the tenant counts. `on_change` is called in the engine's thread.
        """
        transfer = self._transfer()
        lent, done = Lent(len(prepared.ids) - 1, on_change), Future[Lent]()

        def emit(item: Delta | SpecdecError) -> None:
            if isinstance(item, Delta) and item.finish_reason == "length":
                loan.stats = item.stats
                done.set_result(lent)
                return
            transfer.give_back(number)
            ended = EngineError("This prompt is not wanted any more.")
            done.set_exception(item if isinstance(item, SpecdecError) else ended)

        with self._worker.calling():
            request = self._model.core.new_request(
                prepared.ids,
                SamplingParams(max_tokens=1, cache_marks=prepared.params.cache_marks),
                seed=0,
                emit=emit,
                tenant=prepared.terms.tenant,
                prefill_only=True,
            )
            number = request.number
            transfer.lend(number, lent)

            def give_back() -> None:
                self._worker.cancel([number])
                with contextlib.suppress(EngineError):  # an engine that has ended holds nothing
                    self._worker.between_steps(lambda: transfer.give_back(number))

            loan = Loan(lent, done, give_back)
            self._worker.submit([request])
        return loan

    def cached(self, prepared: Prepared) -> "Future[int]":
        """Count the tokens at a prompt's beginning that `lend` would find cached now."""
        return self._worker.between_steps(lambda: self._cached(prepared))

    def begin_landing(self, ids: Sequence[int], tenant: Tenant) -> "Future[Landing | None]":
        """Take memory for a prompt's beginning that another engine has read; None: it is not worth fetching.

        Until there is memory the future can be cancelled. What it gives has to be landed or dropped.
        """
        landings, found = self._transfer().landings, Future[Landing | None]()

        def tell(begun: "Future[None]") -> None:
            if (error := begun.exception()) and not found.done() and found.set_running_or_notify_cancel():
                found.set_exception(error)

        self._worker.between_steps(lambda: landings.begin(tenant, ids, found)).add_done_callback(tell)
        return found

    def land(
        self, landing: Landing, hidden_1D: Tensor | None, *, seconds: float | None = None
    ) -> "Future[bool]":
        """Keep what has come as a cached prefix, after `seconds`; return whether it could be."""
        return self._worker.between_steps(
            lambda: self._transfer().landings.land(landing, hidden_1D, seconds=seconds)
        )

    def sums(self, blocks: Sequence[int], state: int | None) -> list[int]:
        """Add up the 64-bit words of blocks and of a state, each by itself: what a copy of them is known by.

        Any thread may call, while nothing writes into them.
        """
        arena = self.arena
        states = [] if state is None else [arena.state_bytes_X(state)]
        return [_sum(bytes_X) for bytes_X in (*map(arena.block_bytes_X, blocks), *states)]

    def look(self, work: Callable[[PrefixCache], T]) -> "Future[T]":
        """Inspect the cache between two steps."""
        return self._worker.between_steps(lambda: work(self._transfer().cache))

    def fits(self, hidden_1D: Tensor) -> bool:
        """Return whether the draft head can read a hidden state; another size or type fails whole steps."""
        head, dtype = self._model.loop.speculation.head, self.arena.layout.dtype
        return head is not None and hidden_1D.shape == (1, head.head.width) and hidden_1D.dtype == dtype

    def drop(self, landing: Landing) -> "Future[None]":
        """Give a landing's memory back, into which nothing writes any more."""
        return self._worker.between_steps(lambda: self._transfer().landings.drop(landing))

    def _cached(self, prepared: Prepared) -> int:
        cache = self._transfer().cache
        lease = cache.lease(prepared.ids, prepared.terms.tenant)
        cache.leave(lease)
        return lease.length

    def _transfer(self) -> KVTransfer:
        connector = self._model.loop.scheduler.connector
        if not isinstance(connector, KVTransfer):
            raise ConfigError(
                "prefix_cache: what is read for another engine is a prefix that is kept; switch it on.",
                field="prefix_cache",
            )
        return connector


def _sum(bytes_X: Tensor) -> int:
    return int(bytes_X.view(torch.int64).sum())
