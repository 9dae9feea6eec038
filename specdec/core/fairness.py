"""Start-time fair queueing over callers, and over the salts of each caller.

A caller's virtual time is the number of tokens computed for it, divided by its weight. Waiting requests and
prefills of the caller that is furthest behind come first. A caller that had nothing waiting starts at the
virtual time of those that wait: time without work is no credit. One caller alone is served first come, first
served.
"""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from specdec.config.tenant import Tenant
from specdec.core.request import Request

MOST_IDLE = 1024
"""Flows with nothing waiting whose virtual times are remembered; beyond, they start anew."""


class VirtualClock:
    """Virtual times of flows that share something."""

    def __init__(self) -> None:
        self._times: dict[Hashable, float] = {}
        self._now = 0.0
        """Virtual time of the flow that was served last."""

    def at(self, flow: Hashable) -> float:
        return self._times.get(flow, self._now)

    def arrive(self, flow: Hashable, waiting: Collection[Hashable]) -> None:
        """Start a flow that had nothing waiting no earlier than those that have."""
        floor = min(map(self.at, waiting), default=self._now)
        if len(self._times) > MOST_IDLE + len(waiting):
            self._times = {own: self.at(own) for own in waiting}
        self._times[flow] = max(self.at(flow), floor)

    def serve(self, flow: Hashable) -> None:
        """Note that a flow's request was taken out of the queue."""
        self._now = max(self._now, self.at(flow))

    def charge(self, flow: Hashable, cost: float) -> None:
        self._times[flow] = self.at(flow) + cost


class FairQueue:
    """Waiting requests: in the order of their arrival within a flow, which is a caller with a salt."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        """Of callers with a weight other than 1."""
        self._callers = VirtualClock()
        self._salts: dict[str, VirtualClock] = {}
        """Clocks over the salts of each caller that has some."""
        self._waiting: dict[str, dict[str, deque[Request]]] = {}
        """By caller and salt; none of them is empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(own for salts in self._waiting.values() for own in salts.values())

    def append(self, request: Request) -> None:
        """Add a request behind those of its flow."""
        self._flow(request.tenant).append(request)
        self._count += 1

    def appendleft(self, request: Request) -> None:
        """Put a preempted request before those of its flow."""
        self._flow(request.tenant).appendleft(request)
        self._count += 1

    def remove(self, request: Request) -> None:
        caller, salt = request.tenant.flow
        salts = self._waiting[caller]
        salts[salt].remove(request)
        self._count -= 1
        if not salts[salt]:
            del salts[salt]
        if not salts:
            del self._waiting[caller]
            if len(self._salts) > MOST_IDLE:
                self._salts = {own: clock for own, clock in self._salts.items() if own in self._waiting}

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""
        self.remove(request)
        caller, salt = request.tenant.flow
        self._callers.serve(caller)
        if clock := self._salts.get(caller):
            clock.serve(salt)

    def first(self) -> Request | None:
        return next(iter(self.heads()), None)

    def heads(self, pending: Mapping[str, int] | None = None) -> list[Request]:
        """Return the first request of each caller, in the order in which they are to be served.

        `pending` tokens of a caller are admitted and not yet charged.
        """
        heads = {caller: self._head(caller, salts) for caller, salts in self._waiting.items()}
        known = pending or {}

        def rank(caller: str) -> tuple[float, float]:
            ahead = known.get(caller, 0) / self.weight(caller)
            return self._callers.at(caller) + ahead, heads[caller].arrived_s

        return [heads[caller] for caller in sorted(heads, key=rank)]

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """Return the virtual times by which a tenant's requests are ordered, the smallest first."""
        caller, salt = tenant.flow
        return self._callers.at(caller), self._salts[caller].at(salt) if caller in self._salts else 0.0

    def weight(self, caller: str) -> float:
        return self._weights.get(caller, 1.0)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Advance a tenant's virtual time by the tokens that were computed for it."""
        caller, salt = tenant.flow
        self._callers.charge(caller, tokens / self.weight(caller))
        if clock := self._salts.get(caller):
            clock.charge(salt, tokens)

    def shares(self, held: Mapping[str, float], counts: Mapping[str, int], whole: float) -> "Shares":
        """Divide a whole among all callers that run or wait; `counts` are their running requests."""
        weights = {caller: self.weight(caller) for caller in (*counts, *self._waiting)}
        unit = whole / (sum(weights.values()) or 1)
        excess = {own: held[own] - unit * weights[own] for own, count in counts.items() if count > 1}
        above = max(excess, key=excess.__getitem__, default=None)
        is_above = above is not None and len(weights) > 1 and excess[above] > 0
        return Shares(
            held, {own: unit * weight for own, weight in weights.items()}, above if is_above else None
        )

    def _flow(self, tenant: Tenant) -> deque[Request]:
        """Return a tenant's queue, for a request that is put into it."""
        caller, salt = tenant.flow
        if tenant.weight != 1:
            self._weights[caller] = tenant.weight
        if caller not in self._waiting:
            self._callers.arrive(caller, self._waiting)
        salts = self._waiting.setdefault(caller, {})
        if salt and caller not in self._salts:
            self._salts[caller] = VirtualClock()
        if (clock := self._salts.get(caller)) and salt not in salts:
            clock.arrive(salt, salts)
        return salts.setdefault(salt, deque())

    def _head(self, caller: str, salts: Mapping[str, deque[Request]]) -> Request:
        clock = self._salts.get(caller)
        salt = (
            min(salts, key=lambda salt: (clock.at(salt), salts[salt][0].arrived_s))
            if clock
            else next(iter(salts))
        )
        return salts[salt][0]


@dataclass(frozen=True, slots=True)
class Shares:
    """What callers hold of something, and the share of each."""

    held: Mapping[str, float]
    parts: Mapping[str, float]
    above: str | None
    """The caller that most exceeds its share, of those with several running requests.

    The last one is never preempted for another caller: two that cannot run together would alternate.
    """

    def has_room(self, tenant: Tenant, more: float) -> bool:
        """Return whether a waiting caller stays within its share with `more`; holding nothing, it does."""
        caller = tenant.flow[0]
        own = self.held.get(caller, 0)
        return not own or own + more <= self.parts[caller]


def by_caller(requests: Iterable[Request]) -> Counter[str]:
    """Count requests by their callers."""
    return Counter(request.tenant.flow[0] for request in requests)
