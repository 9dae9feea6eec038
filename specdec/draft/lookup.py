"""Look-up drafters: each sequence's text so far, indexed by n-grams."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import DraftRequest, StatelessDrafter
from specdec.draft.history import TokenHistory
from specdec.draft.proposal import DraftShape, Proposal
from specdec.state_slots.slots import RequestId

MOST_INDEXED = 1 << 13
"""Tokens indexed per step: each takes 1 to 2 us, and all rows wait."""


class LookupDrafter(StatelessDrafter, ABC):
    """Base of look-up drafters: one text per sequence, which survives preemption."""

    def __init__(self, lengths: Sequence[int], depth: int, calibrator: Calibrator | None = None) -> None:
        """Index n-grams of these lengths; a match may be up to `depth` tokens long."""
        self.calibrator = calibrator or Calibrator()
        self._lengths, self._depth = lengths, depth
        self._texts: dict[RequestId, TokenHistory] = {}

    @abstractmethod
    def continue_text(self, text: TokenHistory, shape: DraftShape, tenant: Tenant) -> Proposal:
        """Propose continuations of a sequence's text, whose last token is the root."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """Return one proposal per sequence; a long text is indexed over several steps before it gets one."""
        proposals, spare = [], MOST_INDEXED
        for request in requests:
            proposal = None
            if request.shape:
                spare -= self._feed(request, spare)
                if request.key in self._texts and len(self._texts[request.key]) == len(request.tokens):
                    proposal = self.look_up(request.key, request.shape, request.tenant)
            proposals.append(proposal or Proposal.bare(request.tokens[-1]))
        return proposals

    def _feed(self, request: DraftRequest, limit: int) -> int:
        """Index at most `most` further tokens of a sequence; return how many."""
        before = len(self._texts[request.key]) if request.key in self._texts else 0
        new = request.tokens[before : before + limit]
        if new:
            self.extend(request.key, new)
        return len(new)

    def extend(self, key: RequestId, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence's text, which starts with its prompt."""
        if key not in self._texts:
            self._texts[key] = TokenHistory(self._lengths, self._depth)
        self._texts[key].extend(tokens)

    def look_up(self, key: RequestId, shape: DraftShape, tenant: Tenant = SOLE) -> Proposal:
        """Propose continuations of a sequence's text as far as it is indexed."""
        return self.continue_text(self._texts[key], shape, tenant)

    def end(
        self,
        key: RequestId,
        prompt: Sequence[int] = (),
        output: Sequence[int] | None = None,
        tenant: Tenant = SOLE,
    ) -> None:
        """Drop a sequence."""
        self._texts.pop(key, None)

    def forget(self) -> None:
        """Drop all sequences and texts; live sequences are indexed again."""
        self._texts.clear()
        self.flush()
