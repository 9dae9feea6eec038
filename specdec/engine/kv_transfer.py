"""KV cache that engines lend to each other: the memory of a prompt's beginning, which stays in place."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torch import Tensor

from specdec.config.engine import EngineConfig
from specdec.core.kv_connector import KVConnector
from specdec.core.request import Request
from specdec.engine.landing import Landings, Requests
from specdec.setup.build import Model, build
from specdec.state_slots.arena import Arena
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.rates import HostMark, Mark, mark
from specdec.state_slots.slots import Fixed, Kind


class Lent(Fixed):
    """One prompt's beginning: its blocks as they are read, and at the end its state.

    The engine's thread changes it and any thread may read it: what is ready stays as it is, and its bytes
    too, for as long as it is intact.
    """

    def __init__(self, length: int, on_change: Callable[["Lent"], None] | None = None) -> None:
        self.length, self.on_change = length, on_change
        """Tokens that it covers once it is whole; who hears of each change, in the engine's thread."""
        self.blocks: tuple[int, ...] = ()
        """Those whose every token has been read, at the end the last one too."""
        self.state: int | None = None
        """The slot behind the last token; None before it is whole, and in a model without states."""
        self.hidden_1D: Tensor | None = None
        """What a draft head reads next, on the host; None without one."""
        self.generations: tuple[int, ...] = ()
        """Of the blocks, and then of the state."""
        self.intact = True
        """Whether nothing has taken its memory back."""
        self._published: tuple[tuple[int, Mark], ...] = ((0, HostMark()),)
        """Tokens that are ready once the device has come so far, rising."""

    @property
    def ready(self) -> int:
        """Count the tokens whose memory is written and final."""
        return next(tokens for tokens, moment in reversed(self._published) if moment.passed())

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is ready, its state too."""
        return self.ready == self.length

    def publish(self, tokens: int, moment: Mark) -> None:
        """Make this many tokens available once the device has passed a moment."""
        self._published += ((tokens, moment),)
        if self.on_change:
            self.on_change(self)

    def withdraw(self) -> None:
        """Make nothing available any more: what is lent will move, which its readers can see."""
        self._published = self._published[:1]
        self.blocks, self.generations = (), ()


class KVTransfer(KVConnector):
    """Lends prefilled prompts to other engines, and fetches from them, through the prefix cache.

    Any thread may call `lend`; all else is the engine thread's.
    """

    def __init__(self, arena: Arena, cache: PrefixCache, scheduler: Requests) -> None:
        self.arena, self.cache = arena, cache
        self.landings = Landings(arena, cache, scheduler)
        self._by_request: dict[int, Lent] = {}
        """What each prefill-only request lends, by its number."""
        self._held: set[Lent] = set()

    def lend(self, number: int, lent: Lent) -> None:
        """Note what a request will lend, before it is submitted."""
        self._by_request[number] = lent

    @property
    def owners(self) -> Collection[Fixed]:
        return [*self._held, *self.landings.live]

    @property
    def is_receiving(self) -> bool:
        return bool(self.landings.live or self.landings.waiting)

    @property
    def can_start(self) -> bool:
        # Behind one that is landing the others begin with its end.
        return bool(self.landings.waiting) and not self.landings.live

    def advance(self) -> None:
        self.landings.advance()

    def request_computed(self, request: Request) -> None:
        """Lend the blocks that are full; a head's keys at a token depend on the next one."""
        lent, size = self._by_request.get(request.number), self.arena.layout.block_tokens
        if lent is None:  # it was given back
            return
        full = max(request.num_computed_tokens - self.cache.has_head, 0) // size
        if len(lent.blocks) < full < -(-lent.length // size):
            self._share(lent, request.table_N[:full].tolist())
            lent.publish(full * size, mark(self.arena))

    def request_finished(self, request: Request, hidden_1D: Tensor | None) -> None:
        """Lend the last block and the state as well."""
        lent = self._by_request.get(request.number)
        if lent is None:
            return
        self._share(lent, request.table_N[: self.arena.layout.blocks_for(lent.length)].tolist())
        if request.committed:
            lent.state = request.committed.state
            self.arena.share_state(lent, lent.state)
            lent.generations += (self.arena.generation(Kind.STATE, lent.state),)
        lent.hidden_1D = None if hidden_1D is None else hidden_1D.cpu()
        lent.publish(lent.length, mark(self.arena))

    def request_preempted(self, request: Request) -> None:
        lent = self._by_request.get(request.number)
        if lent and lent in self._held:
            self._release(lent)
            lent.withdraw()

    def give_back(self, number: int) -> None:
        """Take back what a request lends; a second call does nothing."""
        lent = self._by_request.pop(number, None)
        if lent:
            lent.intact = False
            if lent in self._held:
                self._release(lent)

    def withdraw_all(self) -> None:
        for lent in list(self._held):
            lent.intact = False
            self._release(lent)

    def reset(self) -> Collection[Fixed]:
        for lent in self._held:
            lent.intact = False
        self._held.clear()
        # Another process may be writing what is landing: no one else is to get that memory.
        return self.landings.begin_afresh()

    def close(self) -> None:
        self.landings.close()

    def _release(self, lent: Lent) -> None:
        self._held.remove(lent)
        self.arena.release_owner(lent)

    def _share(self, lent: Lent, table: Sequence[int]) -> None:
        """Hold the blocks behind those that it has."""
        self._held.add(lent)
        new = table[len(lent.blocks) :]
        for block in new:
            self.arena.share_block(lent, block)
        lent.generations += tuple(self.arena.generation(Kind.BLOCK, block) for block in new)
        lent.blocks += tuple(new)


def build_connected(folder: str | Path, config: EngineConfig) -> Model:
    """Build a model whose loop lends and fetches KV cache, if it keeps prefixes."""
    model = build(folder, config)
    scheduler = model.loop.scheduler
    if scheduler.cache:
        scheduler.connector = KVTransfer(model.loop.arena, scheduler.cache, scheduler)
    return model
