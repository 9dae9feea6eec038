"""Weighted fair queueing over callers, and over the salts of each caller.

A caller's virtual time is the number of tokens computed for it, divided by its weight. Waiting requests and
prefills of the caller that is furthest behind come first. The system's virtual time advances by the tokens of
each step, divided by the weights of all active callers. A caller that had nothing waiting starts no earlier:
time without work is no credit. One caller alone is served in order of arrival.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from specdec.config.tenant import Tenant
from specdec.core.request import Request

MOST_IDLE = 1024
"""Virtual times remembered; beyond that, those not ahead of the system's time are dropped."""


class VirtualClock:
    """Virtual time of each flow, and of the system."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._now = 0.0

    def at(self, flow: str) -> float:
        return self._times.get(flow, self._now)

    def arrive(self, flow: str, waiting: Collection[str]) -> None:
        """Activate a flow that had no waiting requests, at the current time or later."""
        if len(self._times) > MOST_IDLE + len(waiting):
            self._times = {key: at for key, at in self._times.items() if at > self._now or key in waiting}
        self._times[flow] = max(self.at(flow), self._now)

    def charge(self, costs: Mapping[str, float], weights: Mapping[str, float]) -> None:
        """Advance flows by their costs, and the system, whose active flows have these weights."""
        for flow, cost in costs.items():
            self._times[flow] = self.at(flow) + cost / weights[flow]
        self._now += sum(costs.values()) / sum(weights.values())


class FairQueue:
    """Waiting requests: in the order of their arrival within a flow, which is a caller with a salt."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        """Weights other than 1, by caller."""
        self._callers = VirtualClock()
        self._salts: dict[str, VirtualClock] = {}
        """Clock over the salts of each caller that uses salts."""
        self._waiting: dict[str, dict[str, deque[Request]]] = {}
        """By caller and salt; all are non-empty."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(queue for salts in self._waiting.values() for queue in salts.values())

    def append(self, request: Request) -> None:
        """Append a request to its flow."""
        self._flow(request.tenant).append(request)
        self._count += 1

    def appendleft(self, request: Request) -> None:
        """Prepend a preempted request to its flow."""
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
                self._salts = {key: clock for key, clock in self._salts.items() if key in self._waiting}

    def first(self) -> Request | None:
        return next(iter(self.heads()), None)

    def heads(
        self, pending: Mapping[str, int] | None = None, shares: "FairShares | None" = None
    ) -> list[Request]:
        """Return the first request of each caller, in serving order.

        `pending` counts a caller's tokens that are admitted and not yet charged. With `shares`, callers that
        would exceed their share come last: they would be preempted again.
        """
        heads = {caller: self._head(caller, salts) for caller, salts in self._waiting.items()}
        pending_tokens = pending or {}

        def rank(caller: str) -> tuple[bool, float, float]:
            ahead = pending_tokens.get(caller, 0) / self.weight(caller)
            exceeds = shares is not None and not shares.is_entitled(heads[caller].tenant, 1)
            return exceeds, self._callers.at(caller) + ahead, heads[caller].arrived_s

        return [heads[caller] for caller in sorted(heads, key=rank)]

    def rank(self, tenant: Tenant) -> tuple[float, float]:
        """Return the virtual times by which a tenant's requests are ordered, the smallest first."""
        caller, salt = tenant.flow
        return self._callers.at(caller), self._salts[caller].at(salt) if caller in self._salts else 0.0

    def weight(self, caller: str) -> float:
        return self._weights.get(caller, 1.0)

    def charge(self, computed: Iterable[tuple[Tenant, int]]) -> None:
        """Advance tenants' virtual times by the tokens computed for them in a step."""
        callers, salts = Counter[str](), dict[str, Counter[str]]()
        for tenant, tokens in computed:
            caller, salt = tenant.flow
            callers[caller] += tokens
            if caller in self._salts:
                salts.setdefault(caller, Counter())[salt] += tokens
        if callers:
            self._callers.charge(callers, {key: self.weight(key) for key in (*callers, *self._waiting)})
        for caller, costs in salts.items():
            active = (*costs, *self._waiting.get(caller, ()))
            self._salts[caller].charge(costs, dict.fromkeys(active, 1.0))

    def shares(self, held: Mapping[str, float], counts: Mapping[str, int], whole: float) -> "FairShares":
        """Divide a resource among all callers with requests; `counts` are their running requests."""
        weights = {caller: self.weight(caller) for caller in (*counts, *self._waiting)}
        unit = whole / (sum(weights.values()) or 1)
        excess = {key: held[key] - unit * weights[key] for key, count in counts.items() if count > 1}
        above = max(excess, key=excess.__getitem__, default=None)
        is_above = above is not None and len(weights) > 1 and excess[above] > 0
        return FairShares(
            held, {key: unit * weight for key, weight in weights.items()}, above if is_above else None
        )

    def _flow(self, tenant: Tenant) -> deque[Request]:
        """Return a tenant's queue, to insert a request."""
        caller, salt = tenant.flow
        if tenant.weight != 1:
            self._weights[caller] = tenant.weight
        else:
            self._weights.pop(caller, None)
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
class FairShares:
    """Usage of one resource by caller, and each caller's share."""

    held: Mapping[str, float]
    parts: Mapping[str, float]
    above: str | None
    """The caller that most exceeds its share, of those with several running requests.

    The last one is never preempted for another caller: two that cannot run together would alternate.
    """

    def fits(self, tenant: Tenant, more: float) -> bool:
        """Return whether a waiting caller stays within its share with `more`."""
        caller = tenant.flow[0]
        return self.held.get(caller, 0) + more <= self.parts[caller]

    def is_entitled(self, tenant: Tenant, more: float) -> bool:
        """Return whether others may be preempted for it: it stays within its share, or holds nothing."""
        return not self.held.get(tenant.flow[0]) or self.fits(tenant, more)


def by_caller(requests: Iterable[Request]) -> Counter[str]:
    """Return the number of requests by caller."""
    return Counter(request.tenant.flow[0] for request in requests)
