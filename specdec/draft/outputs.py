"""The outputs of finished requests, for look-ups of later ones: each tenant's apart, in bounded memory."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.history import END, History

MAX_TENANTS = 1024
"""An index takes 40 KB before its first token, and salts may be as many as requests."""


class Kept(NamedTuple):
    """One output: the how many-th it was of all, whose, and how long."""

    number: int
    tenant: Tenant
    length: int


@dataclass(slots=True)
class Share:
    """What one caller has left, under whatever salts."""

    outputs: deque[Kept] = field(default_factory=deque)
    """The oldest first; there is one at least."""
    tenants: Counter[Tenant] = field(default_factory=Counter)
    """How many outputs of each are kept."""
    tokens: int = 0


class Outputs:
    """Keeps outputs up to a number of tokens in all; `of` shows a tenant's own, as one history.

    Where there are too many, the caller that has most loses its oldest output: of n callers each keeps an
    n-th, however much the others write. The salts of one caller share its part, the latest output first.
    """

    def __init__(self, lengths: Sequence[int], depth: int, max_tokens: int) -> None:
        self.lengths, self.depth, self.max_tokens = lengths, depth, max_tokens
        self._texts: dict[Tenant, History] = {}
        self._shares: dict[str, Share] = {}
        self._added = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept, one that ends each output included."""
        return sum(share.tokens for share in self._shares.values())

    def of(self, tenant: Tenant) -> Sequence[History]:
        """Return what a tenant has left: one history, or none."""
        text = self._texts.get(tenant)
        return (text,) if text else ()

    def add(self, output: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Keep an output, and evict others to make room; of one too long for a fair part, keep its end."""
        share = self._shares.setdefault(tenant.caller, Share())
        part = max(self.max_tokens // len(self._shares), 2)
        kept = [*output[1 - part :], END]
        if tenant not in self._texts:
            self._texts[tenant] = History(self.lengths, self.depth)
        self._texts[tenant].extend(kept)
        share.outputs.append(Kept(self._added, tenant, len(kept)))
        self._added += 1
        share.tenants[tenant] += 1
        share.tokens += len(kept)
        while self.num_tokens > self.max_tokens:
            self._evict(self._largest(lambda share: share.tokens))
        while len(self._texts) > MAX_TENANTS:
            self._evict(self._largest(lambda share: len(share.tenants)))

    def flush(self, caller: str | None = None) -> None:
        """Forget all of them, or one caller's."""
        for own in list(self._shares) if caller is None else [caller]:
            while own in self._shares:
                self._evict(own)

    def _largest(self, size: Callable[[Share], int]) -> str:
        """Return the caller that has most; of equals the one whose oldest output is the oldest."""
        return max(
            self._shares, key=lambda own: (size(self._shares[own]), -self._shares[own].outputs[0].number)
        )

    def _evict(self, caller: str) -> None:
        """Forget the oldest output of a caller, and its tenant where it was the only one."""
        share = self._shares[caller]
        _, tenant, length = share.outputs.popleft()
        share.tokens -= length
        share.tenants[tenant] -= 1
        if share.tenants[tenant]:
            self._texts[tenant].forget(length)
        else:
            del share.tenants[tenant], self._texts[tenant]
        if not share.outputs:
            del self._shares[caller]
