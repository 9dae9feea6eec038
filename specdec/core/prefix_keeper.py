"""What stands between the loop and the prefixes that are kept: what a request shares, and its states."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from specdec.core.batch import ScheduledRequest
from specdec.core.outputs import PrefixStats
from specdec.core.request import Request
from specdec.core.speculator import Speculation
from specdec.models.network import Network
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import Node
from specdec.state_slots.prefix.tuner import Tuner
from specdec.state_slots.window import RecordSlot, record_ids


class Prefixes:
    """Tells the cache what requests have read. The head has read as far as any state that is kept."""

    def __init__(
        self,
        cache: PrefixCache,
        network: Network,
        arena: Arena,
        speculation: Speculation,
        device: torch.device,
        tuner: Tuner | None = None,
    ) -> None:
        self.cache, self.network, self.arena = cache, network, arena
        self.speculation, self.device, self.tuner = speculation, device, tuner

    def note(self, rows: Sequence[ScheduledRequest]) -> None:
        """Share what prompts have been read of, and keep the states that were to be kept on the way."""
        reading = [row.request for row in rows if row.request.lease and not row.is_decode]
        # Whoever comes here later shares the blocks: the head must have read as far.
        self.speculation.read_on(reading)
        for request in reading:
            node = self._share(request, request.computed)
            if request.lease and request.committed and request.computed in request.lease.stops:
                hidden_1D = self.speculation.last_hidden(request)
                self.cache.keep_copy(node, request.committed.state, hidden_1D)

    def cut(self, request: Request) -> None:
        """Keep nothing of a request whose numbers were wrong, nor what it has gone on from."""
        if request.lease:
            self.cache.cut(request.lease, 0)

    def observe(self, rows: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learn from a step that did nothing but read prompts how long that takes."""
        work = self.cache.score.work
        read = ((row.request.computed, row.num_tokens) for row in rows)
        self.cache.rates.observe_reading(sum(work(end) - work(end - own) for end, own in read), seconds)

    def end(self, request: Request, left: tuple[Committed | None, int] | None = None) -> None:
        """Keep what a request has read, and its state, for those that begin alike.

        `left` is what the device leaves of one that it has served to its end: its state, and at which length.
        """
        if request.lease is None or request.finish_reason is None:
            return
        if self.tuner:
            count = request.prompt_length
            self.tuner.observe(request.tokens[:count], request.tokens[count:], request.lease.tenant)
        committed, computed = left or (request.committed, request.computed)
        # The last token was not read, but by a device that was ahead. A stop may have cut some off.
        length = min(computed, len(request.tokens) - (left is None))
        skipped = computed - length
        hidden_1D = self.speculation.last_hidden(request, skipped) if left is None else None
        node = self._share(request, length)
        if committed is None or node.state is not None or skipped > len(committed.path):
            return
        self._fold(committed.state, committed.path[: len(committed.path) - skipped])
        self.cache.keep(node, request.number, committed.state, hidden_1D)

    def stats(self) -> PrefixStats:
        """Say what was saved; any thread may ask. What is used and kept as well counts as used."""
        kept, alpha = self.arena.usage().kept_bytes, self.cache.score.alpha
        return PrefixStats(**asdict(self.cache.counts), cached_bytes=kept, alpha=alpha)

    def _share(self, request: Request, length: int) -> Node:
        assert request.lease
        return self.cache.note(request.lease, request.tokens[:length], request.table_N.tolist())

    def _fold(self, state: int, path: Sequence[RecordSlot]) -> None:
        """Bring a state up to date with what was accepted."""
        if path:
            state_B = torch.tensor([state], device=self.device)
            self.network.materialize(self.arena, state_B, *record_ids([path], self.device))
