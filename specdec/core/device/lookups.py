"""Replace drafted windows by look-up results where these have a higher expected gain."""

from collections.abc import Sequence

from specdec.core.draft_record import DraftRecord, merged
from specdec.core.request import Request
from specdec.core.speculation import Speculation
from specdec.draft.proposal import DraftShape
from specdec.draft.uniform import UniformPolicy
from specdec.draft.widths import MARGIN

SELDOM = 15
"""Maximum steps between look-ups without use: one takes as long as a small model's step."""


class HostLookups:
    """Runs the look-up drafters, with exponential back-off while they are of no use."""

    def __init__(self, speculation: Speculation, policy: UniformPolicy) -> None:
        self.speculation, self.policy = speculation, policy
        self._wait = self._waited = 0

    def find(self, requests: Sequence[Request], shape: DraftShape | None) -> list[DraftRecord | None]:
        """Return by request the look-up result to verify instead of a draft of this shape, or None."""
        nothing: list[DraftRecord | None] = [None] * len(requests)
        bounds = self.policy.bounds
        if bounds is None or self._waited < self._wait:
            self._waited += 1
            return nothing
        self._waited = 0
        answers = self.speculation.look_up(requests)
        proposals = [
            merged(request, answer, bounds.num_draft_tokens)
            for request, answer in zip(requests, answers, strict=True)
        ]
        drafted = [self._expected(request, shape) for request in requests]
        gains = [max(sum(p.scores[1:]), gain) for p, gain in zip(proposals, drafted, strict=True)]
        rows = len(requests)
        before = (rows + sum(drafted)) / self.policy.cost(shape, rows)
        pays = (rows + sum(gains)) / self.policy.cost_of_found(shape, rows) > MARGIN * before
        self._wait = 0 if pays else min(2 * self._wait + 1, SELDOM)
        if not pays:
            return nothing
        return [
            DraftRecord(None, tuple(answer), proposal) if sum(proposal.scores[1:]) > gain else None
            for answer, proposal, gain in zip(answers, proposals, drafted, strict=True)
        ]

    def _expected(self, request: Request, shape: DraftShape | None) -> float:
        return self.speculation.acceptance.of(request).expected(shape, shape.num_steps) if shape else 0.0
