"""Drafters that look text up, told of a sequence only when they are asked about it."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from specdec.config.tenant import Tenant
from specdec.draft.calibration import Calibrator
from specdec.draft.drafter import Want
from specdec.draft.proposal import Proposal, Shape


class TextIndex(Protocol):
    calibrator: Calibrator

    def begin(self, key: Hashable, tokens: Sequence[int], tenant: Tenant) -> None: ...

    def extend(self, key: Hashable, tokens: Sequence[int]) -> None: ...

    def propose(self, key: Hashable, shape: Shape) -> Proposal: ...

    def end(self, key: Hashable) -> None: ...

    def share(self, output: Sequence[int], tenant: Tenant) -> None:
        """Keep the output of a sequence that has finished for later ones of its tenant."""
        ...

    def flush(self, caller: str | None = None) -> None:
        """Forget what sequences that have ended left: all, or one caller's."""
        ...

    def forget(self) -> None: ...


MOST_INDEXED = 1 << 13
"""Tokens indexed per step: each takes 1 to 2 us, and all rows wait."""


class Lookup:
    """Feed an index what each sequence has said since it was last asked. Memory that is lost is no matter."""

    def __init__(self, index: TextIndex) -> None:
        self.index, self.calibrator = index, index.calibrator
        self._fed: dict[Hashable, int] = {}

    def propose(self, wants: Sequence[Want]) -> list[Proposal]:
        """Propose what may follow each sequence; a long text is indexed over several steps before that."""
        found, spare = [], MOST_INDEXED
        for want in wants:
            proposal = Proposal.bare(want.tokens[-1])
            if want.shape:
                spare -= self._feed(want, spare)
                if self._fed.get(want.key) == len(want.tokens):
                    proposal = self.index.propose(want.key, want.shape)
            found.append(proposal)
        return found

    def _feed(self, want: Want, most: int) -> int:
        """Index at most `most` further tokens of a sequence; return how many."""
        before = start = self._fed.get(want.key, 0)
        end = min(len(want.tokens), before + most)
        if end and want.key not in self._fed:
            start = min(end, want.prompt_length)
            self.index.begin(want.key, want.tokens[:start], want.tenant)
        if end:
            self.index.extend(want.key, want.tokens[start:end])
            self._fed[want.key] = end
        return end - before

    def on_preempt(self, key: Hashable) -> None:
        """Keep the text, which stays what it is."""

    def end(self, key: Hashable, prompt: Sequence[int], output: Sequence[int] | None, tenant: Tenant) -> None:
        """Forget a sequence; an output that came to its end serves its tenant, where the index wants it."""
        if self._fed.pop(key, None) is not None:
            self.index.end(key)
        if output:
            self.index.share(output, tenant)

    def flush(self, caller: str | None = None) -> None:
        """Forget what sequences that have ended left: all, or one caller's."""
        self.index.flush(caller)

    def forget(self) -> None:
        """Forget every sequence and text; those that go on are fed anew."""
        self._fed.clear()
        self.index.forget()
