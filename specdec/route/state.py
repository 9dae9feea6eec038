"""What all requests share: the replicas, the connections to them, and the requests under way."""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from specdec.ray.choose import Choice, choose
from specdec.ray.prompts import Prompt
from specdec.ray.upstream import Upstream
from specdec.route.addresses import Address
from specdec.route.metrics import RouteMetrics
from specdec.route.replicas import Fleet, Replica
from specdec.route.settings import RouteConfig
from specdec.server.connections import Connections
from specdec.server.failures import Failure
from specdec.server.origins import Origins, PageGuard
from specdec.server.receive import ARRIVING_BYTES, BodyBudget
from specdec.server.threads import ThreadPool

SOON = {"Retry-After": "1"}
STOPPING = {"Retry-After": "10"}
KEPT_BYTES = 192 << 20
"""Memory for bodies that have arrived, unpacked, until a replica has begun to answer. The process grows by
about twice what one address may take of it."""
MOST_OWNED = 100_000
"""Stored responses of which the router remembers who has them."""


class State:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouteConfig, addresses: Sequence[Address], upstream: Upstream) -> None:
        self.config, self.fleet = config, Fleet(addresses)
        self.metrics, self.upstream = RouteMetrics(self.fleet), upstream
        self.connections = Connections(config.max_connections, config.idle_timeout, files=3)
        self.large = ThreadPool("looking", config.max_requests)
        """Threads that parse large bodies, round-robin over clients."""
        self.guard = PageGuard(Origins(None), config.host)
        """For the router's own figures; replicas check what goes on to them."""
        self.draining = False
        self.tasks: set[asyncio.Task[object]] = set()
        """Requests under way."""
        self.counts: Counter[str] = Counter()
        """By address, how many of them are its own."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.arriving = BodyBudget(ARRIVING_BYTES, config.max_body_bytes)
        self.kept = BodyBudget(KEPT_BYTES, config.max_body_bytes)
        """Memory for bodies; a caller is a client's address, as keys are checked by replicas alone."""
        self._owners: OrderedDict[str, str] = OrderedDict()

    def choose(self, prompt: Prompt, found: Sequence[Replica]) -> Choice[Replica] | None:
        """Choose one of these replicas; one that says that it has the model, if any does."""
        having = [own for own in found if prompt.model in own.models] if prompt.model else []
        return choose(having or found, prompt, self.config.load_factor)

    def own(self, name: str, replica: Replica) -> None:
        """Remember which replica has stored a response."""
        self._owners[name] = replica.url
        while len(self._owners) > MOST_OWNED:
            self._owners.popitem(last=False)

    def owner(self, name: str) -> Replica | None:
        """Return the replica that has stored a response, if it is known and up."""
        url = self._owners.get(name)
        return next((own for own in self.fleet.replicas if own.url == url and own.is_up), None)

    @contextlib.contextmanager
    def under_way(self, caller: str) -> Iterator[None]:
        """Admit an address's request, or refuse it.

        One address gets half of `max_requests` and the next one half of the rest.
        """
        if self.draining:
            raise Failure(503, "The router is stopping; use another one.", code="stopping", headers=STOPPING)
        own, most = self.counts[caller], self.config.max_requests
        if own + len(self.tasks) >= most:
            raise Failure(
                429,
                f"{len(self.tasks)} requests are in flight, {own} of them of this address, of at most {most} "
                "(max_requests of the router); try again later.",
                code="too_many_requests",
                headers=SOON,
            )
        task = asyncio.current_task()
        assert task, "a request has a task"
        self.tasks.add(task)
        self.counts[caller] += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.tasks.discard(task)
            self.counts[caller] -= 1
            if not self.counts[caller]:
                del self.counts[caller]
            if not self.tasks:
                self.idle.set()
