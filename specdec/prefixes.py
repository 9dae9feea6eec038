"""What stands between the loop and the prefixes that are kept: what a request shares, and its states."""

from collections.abc import Sequence

import torch

from specdec.models.network import Network
from specdec.parts import Part
from specdec.request import Request
from specdec.speculation import Speculation
from specdec.state_slots.arena import Arena
from specdec.state_slots.backing import Committed
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.tree import Node
from specdec.state_slots.window import record_ids


class Prefixes:
    """Tells the cache what requests have read. The head has read as far as any state that is kept."""

    def __init__(
        self,
        cache: PrefixCache,
        network: Network,
        arena: Arena,
        speculation: Speculation,
        device: torch.device,
    ) -> None:
        self.cache, self.network, self.arena = cache, network, arena
        self.speculation, self.device = speculation, device

    def note(self, parts: Sequence[Part]) -> None:
        """Share what prompts have been read of, and keep the states that were to be kept on the way."""
        for part in parts:
            request = part.request
            if request.lease is None or part.decodes:
                continue
            stops = request.computed in request.lease.stops
            node = self._share(request, request.computed)
            if stops and request.committed:
                hidden_1D = self.speculation.last_hidden(request)
                self.cache.keep_copy(node, request.committed.state, hidden_1D)

    def end(self, request: Request) -> None:
        """Keep what a request has read, and its state, for those that begin alike."""
        if request.lease is None or request.finish_reason is None:
            return
        # The last token was chosen and not read. Of those that were, a stop may have cut some off.
        length = min(request.computed, len(request.tokens) - 1)
        node = self._share(request, length)
        if request.committed and node.state is None:
            self._keep(request, node, request.committed, request.computed - length)

    def _share(self, request: Request, length: int) -> Node:
        assert request.lease
        return self.cache.note(request.lease, request.tokens[:length], request.table_N.tolist())

    def _keep(self, request: Request, node: Node, committed: Committed, skipped: int) -> None:
        """Hand a request's state over as it was before the last tokens, if its path goes back so far."""
        if skipped > len(committed.path):
            return
        if path := committed.path[: len(committed.path) - skipped]:
            state_B = torch.tensor([committed.state], device=self.device)
            self.network.materialize(self.arena, state_B, *record_ids([path], self.device))
        hidden_1D = self.speculation.last_hidden(request, skipped)
        self.cache.keep(node, request.number, committed.state, hidden_1D)
