"""What all requests share: the replicas, the connections to them, and the requests under way."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from specdec.route.addresses import Address
from specdec.route.choose import Choice, choose
from specdec.route.metrics import RouteMetrics
from specdec.route.prompts import Prompt
from specdec.route.replicas import Fleet, Replica
from specdec.route.settings import RouteConfig
from specdec.route.upstream import Upstream
from specdec.server.connections import Connections
from specdec.server.failures import Failure
from specdec.server.threads import Pool

SOON = {"Retry-After": "1"}
STOPPING = {"Retry-After": "10"}
MOST_HELD_BYTES = 1 << 30
"""Of bodies that are kept until a replica answers; small ones do not count."""
SMALL = 1 << 16
MOST_OWNED = 100_000
"""Stored responses of which the router remembers who has them."""


class State:
    """Owned by the event loop's thread."""

    def __init__(self, config: RouteConfig, addresses: Sequence[Address], upstream: Upstream) -> None:
        self.config, self.fleet = config, Fleet(addresses)
        self.metrics, self.upstream = RouteMetrics(self.fleet), upstream
        self.connections = Connections(config.max_connections, config.idle_timeout, files=3)
        self.large = Pool("looking", config.max_requests)
        """Threads that look at large bodies, by turns of their clients."""
        self.draining = False
        self.tasks: set[asyncio.Task[object]] = set()
        """Requests under way."""
        self.idle = asyncio.Event()
        self.idle.set()
        self.held_bytes = 0
        self._owners: OrderedDict[str, str] = OrderedDict()

    def choose(self, prompt: Prompt, found: Sequence[Replica]) -> Choice | None:
        """Choose one of these replicas; one that says that it has the model, if any does."""
        having = [own for own in found if prompt.model in own.models] if prompt.model else []
        return choose(self.fleet, having or found, prompt, self.config.load_factor)

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
    def under_way(self) -> Iterator[None]:
        """Admit a request, or refuse it."""
        if self.draining:
            raise Failure(503, "The router is stopping; ask another one.", code="stopping", headers=STOPPING)
        if len(self.tasks) >= self.config.max_requests:
            raise Failure(
                429,
                f"{len(self.tasks)} requests are under way, which is max_requests of the router; try again "
                "later.",
                code="too_many_requests",
                headers=SOON,
            )
        task = asyncio.current_task()
        assert task, "a request has a task"
        self.tasks.add(task)
        self.idle.clear()
        try:
            yield
        finally:
            self.tasks.discard(task)
            if not self.tasks:
                self.idle.set()

    @contextlib.contextmanager
    def holding(self, num_bytes: int) -> Iterator["Held"]:
        """Admit a body of so many bytes at most, or refuse it: whoever sends them need show no key here."""
        held = Held(self)
        if num_bytes > SMALL and self.held_bytes and self.held_bytes + num_bytes > MOST_HELD_BYTES:
            raise Failure(
                429,
                f"Bodies of {self.held_bytes:,} bytes are under way, of at most {MOST_HELD_BYTES:,}; try "
                "again later.",
                code="too_many_requests",
                headers=SOON,
            )
        held.comes_to(num_bytes)
        try:
            yield held
        finally:
            held.comes_to(0)


class Held:
    """A body that is kept."""

    def __init__(self, state: State) -> None:
        self._state, self._counted = state, 0

    def comes_to(self, num_bytes: int) -> None:
        """Count so many bytes of it."""
        counted = num_bytes if num_bytes > SMALL else 0
        self._state.held_bytes += counted - self._counted
        self._counted = counted
