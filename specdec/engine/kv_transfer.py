"""KV cache lent to other engines: a prompt's blocks and state, which stay in place."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.core.kv_connector import KVConnector
from specdec.core.request import Request
from specdec.engine.incoming import IncomingPrefixes, SchedulerLoad
from specdec.setup.build import LoadedModel, build
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.rates import HostMark, TimeMark, mark
from specdec.state_slots.slots import FixedOwner, SlabKind


class LentPrefix(FixedOwner):
    """A lent prefix: its full blocks during prefill, and finally its state.

    The engine thread changes it and any thread may read it: published memory is final, and valid while
    `intact`.
    """

    def __init__(self, length: int, on_change: Callable[["LentPrefix"], None] | None = None) -> None:
        self.length, self.on_change = length, on_change
        """Number of tokens when complete; callback for each change, in the engine thread."""
        self.blocks: tuple[int, ...] = ()
        """Full blocks, and at the end the last partial one."""
        self.state: int | None = None
        """State slot after the last token; None until complete, or for a model without states."""
        self.hidden_1D: Tensor | None = None
        """Next input of a draft head, on the host; None without one."""
        self.generations: tuple[int, ...] = ()
        """Generations of the blocks, then of the state."""
        self.intact = True
        """False once its memory has been reclaimed."""
        self._published: tuple[tuple[int, TimeMark], ...] = ((0, HostMark()),)
        """Token counts in ascending order, each with the device event after which they are ready."""

    @property
    def ready(self) -> int:
        """Return the number of tokens whose memory is written and final."""
        return next(tokens for tokens, in_flight in reversed(self._published) if in_flight.passed())

    @property
    def is_whole(self) -> bool:
        """Whether all of it is ready, including the state."""
        return self.ready == self.length

    def publish(self, tokens: int, in_flight: TimeMark) -> None:
        """Publish this many tokens once the device has passed an event."""
        self._published += ((tokens, in_flight),)
        if self.on_change:
            self.on_change(self)

    def withdraw(self) -> None:
        """Withdraw all blocks, which will be reused; readers can detect it."""
        self._published = self._published[:1]
        self.blocks, self.generations = (), ()


class KVTransfer(KVConnector):
    """Lends prefilled prompts to other engines and fetches from them, via the prefix cache.

    `lend` is thread-safe; all else belongs to the engine thread.
    """

    def __init__(self, arena: Arena, cache: PrefixCache, scheduler: SchedulerLoad) -> None:
        self.arena, self.cache = arena, cache
        self.landings = IncomingPrefixes(arena, cache, scheduler)
        self._by_request: dict[int, LentPrefix] = {}
        """Lent prefixes by the number of their prefill-only request."""
        self._active: set[LentPrefix] = set()

    def lend(self, number: int, lent: LentPrefix) -> None:
        """Register what a request will lend, before it is submitted."""
        self._by_request[number] = lent

    @property
    def owners(self) -> Collection[FixedOwner]:
        return [*self._active, *self.landings.live]

    @property
    def is_receiving(self) -> bool:
        return bool(self.landings.live or self.landings.waiting)

    @property
    def can_start(self) -> bool:
        # While one is landing, the others start when it ends.
        return bool(self.landings.waiting) and not self.landings.live

    def advance(self) -> None:
        self.landings.advance()

    def request_computed(self, request: Request) -> None:
        """Lend the full blocks. A head's keys at a token depend on the next token, so it lags by one."""
        lent, size = self._by_request.get(request.number), self.arena.layout.block_tokens
        if lent is None:  # it was given back
            return
        num_full = max(request.num_computed_tokens - self.cache.has_head, 0) // size
        if len(lent.blocks) < num_full < -(-lent.length // size):
            self._share(lent, request.table_N[:num_full].tolist())
            lent.publish(num_full * size, mark(self.arena))

    def request_finished(self, request: Request, hidden_1D: Tensor | None) -> None:
        """Lend the last block and the state."""
        lent = self._by_request.get(request.number)
        if lent is None:
            return
        self._share(lent, request.table_N[: self.arena.layout.blocks_for(lent.length)].tolist())
        if request.committed:
            lent.state = request.committed.state
            self.arena.share_state(lent, lent.state)
            lent.generations += (self.arena.generation(SlabKind.STATE, lent.state),)
        lent.hidden_1D = None if hidden_1D is None else hidden_1D.cpu()
        lent.publish(lent.length, mark(self.arena))

    def request_preempted(self, request: Request) -> None:
        lent = self._by_request.get(request.number)
        if lent and lent in self._active:
            self._release(lent)
            lent.withdraw()

    def give_back(self, number: int) -> None:
        """Release what a request lends; idempotent."""
        lent = self._by_request.pop(number, None)
        if lent:
            lent.intact = False
            if lent in self._active:
                self._release(lent)

    def withdraw_all(self) -> None:
        for lent in list(self._active):
            lent.intact = False
            self._release(lent)

    def reset(self) -> Collection[FixedOwner]:
        for lent in self._active:
            lent.intact = False
        self._active.clear()
        # Another process may still write to landing memory, so it stays allocated.
        return self.landings.begin_afresh()

    def close(self) -> None:
        self.landings.close()

    def _release(self, lent: LentPrefix) -> None:
        self._active.remove(lent)
        self.arena.release_owner(lent)

    def _share(self, lent: LentPrefix, table: Sequence[int]) -> None:
        """Share the new blocks of a table."""
        self._active.add(lent)
        added = table[len(lent.blocks) :]
        for block in added:
            self.arena.share_block(lent, block)
        lent.generations += tuple(self.arena.generation(SlabKind.BLOCK, block) for block in added)
        lent.blocks += tuple(added)


def build_connected(folder: str | Path, config: EngineConfig) -> LoadedModel:
    """Build a model, with KV transfer if it has a prefix cache."""
    model = build(folder, config)
    scheduler = model.loop.scheduler
    if scheduler.cache:
        scheduler.connector = KVTransfer(model.loop.arena, scheduler.cache, scheduler)
    return model
