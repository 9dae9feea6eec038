"""Transfers of prefilled prompts between engines: lending and landing."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from specdec.config.sampling import SamplingParams
from specdec.config.tenant import Tenant
from specdec.core.outputs import Delta, RequestStats
from specdec.core.params import PreparedPrompt
from specdec.engine.incoming import IncomingPrefix
from specdec.engine.kv_transfer import KVTransfer, LentPrefix
from specdec.engine.thread import Worker
from specdec.errors import ConfigError, EngineError, SpecdecError
from specdec.setup.build import LoadedModel
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.cache import PrefixCache

T = TypeVar("T")


class PrefixLoan:
    """A prompt prefilled to be lent. Thread-safe."""

    def __init__(self, lent: LentPrefix, done: "Future[LentPrefix]", give_back: Callable[[], None]) -> None:
        self.lent, self.done = lent, done
        """`done` resolves when the last of it is in flight, or raises the error."""
        self.stats: RequestStats | None = None
        """Statistics of the prefill; None before it is done."""
        self.give_back = give_back
        """Stop the prefill and release its memory between two steps; idempotent."""


class Transfers:
    """An engine's interface to transfers; thread-safe."""

    def __init__(self, worker: Worker, model: LoadedModel) -> None:
        self._worker, self._model = worker, model

    @property
    def arena(self) -> Arena:
        """The arena that other engines read from and that fetches write to."""
        return self._model.loop.arena

    def lend(
        self, prepared: PreparedPrompt, on_change: Callable[[LentPrefix], None] | None = None
    ) -> PrefixLoan:
        """Prefill all but the last token of a prompt, and keep its memory in place until given back.

        Only the tenant and cache marks of its parameters are used. `on_change` is called in the engine
        thread.
        """
        transfer = self._transfer()
        lent, done = LentPrefix(len(prepared.ids) - 1, on_change), Future[LentPrefix]()

        def emit(item: Delta | SpecdecError) -> None:
            if isinstance(item, Delta) and item.finish_reason == "length":
                loan.stats = item.stats
                done.set_result(lent)
                return
            transfer.give_back(number)
            ended = EngineError("This prompt was cancelled.")
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

            loan = PrefixLoan(lent, done, give_back)
            self._worker.submit([request])
        return loan

    def cached(self, prepared: PreparedPrompt) -> "Future[int]":
        """Return the number of prompt tokens that `lend` would find cached now."""
        return self._worker.between_steps(lambda: self._cached(prepared))

    def begin_landing(self, ids: Sequence[int], tenant: Tenant) -> "Future[IncomingPrefix | None]":
        """Allocate memory for a prefix that another engine has prefilled; None: not worth fetching.

        Until memory is available the future can be cancelled. Its result must be landed or dropped.
        """
        landings, future = self._transfer().landings, Future[IncomingPrefix | None]()

        def forward(started: "Future[None]") -> None:
            if (error := started.exception()) and not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._worker.between_steps(lambda: landings.begin(tenant, ids, future)).add_done_callback(forward)
        return future

    def land(
        self, landing: IncomingPrefix, hidden_1D: Tensor | None, *, seconds: float | None = None
    ) -> "Future[bool]":
        """Add a fetched prefix to the cache, after `seconds` of transfer; return whether it was possible."""
        return self._worker.between_steps(
            lambda: self._transfer().landings.land(landing, hidden_1D, seconds=seconds)
        )

    def sums(self, blocks: Sequence[int], state: int | None) -> list[int]:
        """Return checksums: the sum of the 64-bit words of each block, and of the state.

        Thread-safe while nothing writes to them.
        """
        arena = self.arena
        states = [] if state is None else [arena.state_bytes_X(state)]
        return [_sum(bytes_X) for bytes_X in (*map(arena.block_bytes_X, blocks), *states)]

    def look(self, work: Callable[[PrefixCache], T]) -> "Future[T]":
        """Run a function on the cache between two steps."""
        return self._worker.between_steps(lambda: work(self._transfer().cache))

    def fits(self, hidden_1D: Tensor) -> bool:
        """Return whether the draft head accepts a hidden state; a wrong size or type would fail steps."""
        head, dtype = self._model.loop.speculation.head, self.arena.layout.dtype
        return head is not None and hidden_1D.shape == (1, head.head.width) and hidden_1D.dtype == dtype

    def drop(self, landing: IncomingPrefix) -> "Future[None]":
        """Release a landing's memory, to which nothing writes any more."""
        return self._worker.between_steps(lambda: self._transfer().landings.drop(landing))

    def _cached(self, prepared: PreparedPrompt) -> int:
        cache = self._transfer().cache
        lease = cache.lease(prepared.ids, prepared.terms.tenant)
        cache.leave(lease)
        return lease.length

    def _transfer(self) -> KVTransfer:
        connector = self._model.loop.scheduler.connector
        if not isinstance(connector, KVTransfer):
            raise ConfigError(
                "prefix_cache: prompts for other engines are served from the prefix cache; switch it on.",
                field="prefix_cache",
            )
        return connector


def _sum(bytes_X: Tensor) -> int:
    return int(bytes_X.view(torch.int64).sum())
