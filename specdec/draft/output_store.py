"""Outputs of finished requests for look-ups by later ones, separate per tenant, in bounded memory."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.config.tenant import SOLE, Tenant
from specdec.draft.history import END, TokenHistory

MAX_TENANTS = 1024
"""Maximum indices: each takes 40 KB before its first token, and there may be a salt per request."""


class StoredOutput(NamedTuple):
    """One output: its serial number, tenant and length."""

    number: int
    tenant: Tenant
    length: int


@dataclass(slots=True)
class CallerOutputs:
    """All outputs of one caller, whatever their salts."""

    outputs: deque[StoredOutput] = field(default_factory=deque)
    """The oldest first; never empty."""
    tenants: Counter[Tenant] = field(default_factory=Counter)
    """Number of outputs per tenant."""
    tokens: int = 0


class OutputStore:
    """Stores outputs up to a total number of tokens; `of` returns a tenant's own as one history.

    Over the limit, the caller with the most tokens loses its oldest output, so each of n callers can keep an
    nth of the capacity however much the others generate. A caller's salts share its part.
    """

    def __init__(self, lengths: Sequence[int], depth: int, max_tokens: int) -> None:
        self.lengths, self.depth, self.max_tokens = lengths, depth, max_tokens
        self._texts: dict[Tenant, TokenHistory] = {}
        self._shares: dict[str, CallerOutputs] = {}
        self._added = 0

    @property
    def num_tokens(self) -> int:
        """Number of stored tokens, including one separator per output."""
        return sum(share.tokens for share in self._shares.values())

    def of(self, tenant: Tenant) -> Sequence[TokenHistory]:
        """Return the tenant's history, or an empty tuple."""
        text = self._texts.get(tenant)
        return (text,) if text else ()

    def add(self, output: Sequence[int], tenant: Tenant = SOLE) -> None:
        """Add an output, evicting others if needed; if it exceeds a fair share, only its end is stored."""
        share = self._shares.setdefault(tenant.caller, CallerOutputs())
        part = max(self.max_tokens // len(self._shares), 2)
        kept = [*output[1 - part :], END]
        if tenant not in self._texts:
            self._texts[tenant] = TokenHistory(self.lengths, self.depth)
        self._texts[tenant].extend(kept)
        share.outputs.append(StoredOutput(self._added, tenant, len(kept)))
        self._added += 1
        share.tenants[tenant] += 1
        share.tokens += len(kept)
        while self.num_tokens > self.max_tokens:
            self._evict(self._largest(lambda share: share.tokens))
        while len(self._texts) > MAX_TENANTS:
            self._evict(self._largest(lambda share: len(share.tenants)))

    def flush(self, caller: str | None = None) -> None:
        """Drop all outputs, or one caller's."""
        for name in list(self._shares) if caller is None else [caller]:
            while name in self._shares:
                self._evict(name)

    def _largest(self, size: Callable[[CallerOutputs], int]) -> str:
        """Return the caller with the largest size; ties go to the one with the oldest output."""
        return max(
            self._shares, key=lambda name: (size(self._shares[name]), -self._shares[name].outputs[0].number)
        )

    def _evict(self, caller: str) -> None:
        """Drop a caller's oldest output, and the tenant's index with its last output."""
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
