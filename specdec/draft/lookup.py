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

    def propose(self, wants: Sequence[DraftRequest]) -> list[Proposal]:
        """Return one proposal per sequence; a long text is indexed over several steps before it gets one."""
        found, spare = [], MOST_INDEXED
        for want in wants:
            proposal = None
            if want.shape:
                spare -= self._feed(want, spare)
                if want.key in self._texts and len(self._texts[want.key]) == len(want.tokens):
                    proposal = self.look_up(want.key, want.shape, want.tenant)
            found.append(proposal or Proposal.bare(want.tokens[-1]))
        return found

    def _feed(self, want: DraftRequest, most: int) -> int:
        """Index at most `most` further tokens of a sequence; return how many."""
        before = len(self._texts[want.key]) if want.key in self._texts else 0
        new = want.tokens[before : before + most]
        if new:
            self.extend(want.key, new)
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
