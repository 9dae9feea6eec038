"""Track which tokens of each request a draft head has processed."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from specdec.core.batch import ScheduledRequest
from specdec.core.draft_record import want_of
from specdec.core.executor import Forward
from specdec.core.request import Request
from specdec.draft.drafter import DraftRequest
from specdec.draft.head import HeadDrafter
from specdec.state_slots.prefix.lease import PrefixHit
from specdec.verify.walk import AcceptedPath


class HeadState:
    """Keeps a head in step with every request; all methods are no-ops without a head."""

    def __init__(self) -> None:
        self.head: HeadDrafter | None = None

    @property
    def aux_layers(self) -> Sequence[int]:
        """Layers whose inputs the head uses."""
        return self.head.head.aux_hidden_layers if self.head else ()

    def read(self, rows: Sequence[ScheduledRequest], paths: Sequence[AcceptedPath], forward: Forward) -> None:
        """Pass the hidden states of each accepted path to the head."""
        head = self.head
        if head is None:
            return
        hidden_TD = head.head.combine_hidden_states(forward.hidden_TD, forward.aux)
        for row, path, first in zip(rows, paths, forward.first_B, strict=True):
            number, nodes = row.request.number, path.nodes
            if len(nodes) == len(hidden_TD):
                head.read(number, hidden_TD, whole=True)
            elif nodes:
                straight = nodes[-1] == len(nodes) - 1
                kept = slice(first, first + len(nodes)) if straight else [first + node for node in nodes]
                head.read(number, hidden_TD[kept])

    def is_full(self, request: Request) -> bool:
        """Return whether the head should read a request's hidden states even if no draft is wanted."""
        return self.head is not None and self.head.is_full(request.number)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Run the head on requests that draft nothing before their backlog grows too large."""
        if self.head is None:
            return
        full = [request for request in requests if self.is_full(request)]
        # Requests beyond the head's budget would only copy their pending hidden states.
        backlogs = accumulate(self.head.num_unread(request.number) for request in full)
        now = [r for r, count in zip(full, backlogs, strict=True) if count <= self.head.chunk_tokens]
        if full:
            # One stays pending: the next draft starts from it, on the device or here.
            self.head.catch_up_to([want_of(request, None) for request in now or full[:1]], most=1)

    def restore(self, request: Request, hit: PrefixHit) -> None:
        """Start after a cache hit: the head has also processed the cached tokens.

        The last of them is pending, since it needs the next token, unless the target prefills it again.
        """
        if self.head and hit.length:
            self.head.restore(request.number, hit.length - (hit.hidden_1D is not None), hit.hidden_1D)

    def read_on(self, requests: Sequence[Request]) -> None:
        """Run the head on all computed tokens, except the last, which needs the next token."""
        if self.head and requests:
            while not self.head.catch_up_to([want_of(request, None) for request in requests], most=1):
                pass

    def read_ended(self, ended: Sequence[tuple[Request, int]]) -> set[int]:
        """Catch up the head on ended requests, except for the last hidden state; return their numbers.

        The given number of computed but not accepted tokens of each is dropped. At most `chunk_tokens` are
        processed, the smallest backlog first, but at least one request.
        """
        head = self.head
        if head is None:
            return {request.number for request, _ in ended}
        spare, numbers = head.chunk_tokens, set[int]()
        requests: list[DraftRequest] = []
        for request, skipped in sorted(ended, key=lambda item: head.num_unread(item[0].number)):
            if head.num_unread(request.number) <= skipped:
                continue  # a draft with NaN left none
            spare -= head.num_unread(request.number) - skipped - 1
            if spare < 0 and requests:
                break
            if skipped:
                head.drop(request.number, skipped)
            tokens = request.tokens[: request.num_computed_tokens + 1 - skipped]
            requests.append(
                DraftRequest(request.number, request.prompt_length, tokens, request.table_N, None)
            )
            numbers.add(request.number)
        while requests and not head.catch_up_to(requests, most=1):
            pass
        return numbers

    def last_hidden(self, request: Request) -> Tensor | None:
        """Return the hidden state of the request's last computed token, or None without a head."""
        return self.head.last(request.number) if self.head else None
