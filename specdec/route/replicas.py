"""The replicas, and what the router knows of each. All of it is owned by the event loop's thread."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdec.route.addresses import Address, Role
from specdec.route.prompts import Known, Prompt
from specdec.route.rates import ASSUMED, START, Line, Measured, added, fitted

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One `specdec serve`. It is down until its first check succeeds."""

    address: Address
    measured: Measured = field(default_factory=Measured)
    is_up: bool = False
    in_flight: int = 0
    """Requests that it has from this router."""
    reading: int = 0
    """Bytes of their prompts that it has not read yet, as far as is known."""
    waiting: float = 0.0
    """Requests that wait for memory or a slot, as it says itself."""
    arena: float = 0.0
    """The part of its memory for sequences that is in use, as it says itself."""
    models: frozenset[str] = frozenset()
    """Names of its models, as it says itself; none if it says nothing."""
    told_role: str | None = None
    """What it lends and fetches, as it says itself; None: it was not asked yet."""
    known: Known = field(default_factory=Known)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it checked at once."""
    _failed: int = 0
    _succeeded: int = 0

    @property
    def url(self) -> str:
        return self.address.url

    def note_check(self, why: str | None, *, failures: int, successes: int) -> None:
        """Count a check, or a connection that was refused; `why` says what was wrong with it."""
        self._failed, self._succeeded = (0, self._succeeded + 1) if why is None else (self._failed + 1, 0)
        if not self.is_up and self._succeeded >= successes:
            self.is_up = True
            logger.info("%s is up", self.url)
        elif self._failed == failures or (self.is_up and self._failed > failures):
            self.is_up = False  # of one that was not up yet that is told too
            self.known.forget()
            logger.warning("%s is down: %s", self.url, why)

    def note_role(self, told: str, *, suits_both: bool) -> None:
        """Log once that a replica does not do what its role demands.

        `told` is the role that it says it has, if any; `suits_both`: one of role both does either.
        """
        if told == self.told_role:
            return
        self.told_role, wanted = told, self.address.role
        if wanted is not Role.BOTH and told != wanted and not (told == Role.BOTH and suits_both):
            logger.warning(
                "%s is given as %s, but its role is %s: start it with SPECDEC_REACH_SECRET in its "
                "environment and --role %s",
                self.url,
                wanted,
                told or "none",
                wanted,
            )

    @contextlib.contextmanager
    def under_way(self, prompt: Prompt, line: Line) -> Iterator["Flight"]:
        """Count a request from its sending to the end of its answer; reading takes as long as `line` says."""
        flight = Flight(self, prompt, line)
        self.in_flight += 1
        try:
            yield flight
        finally:
            flight.end_reading()
            self.in_flight -= 1


class Flight:
    """One request that a replica has."""

    def __init__(self, replica: Replica, prompt: Prompt, line: Line) -> None:
        self._replica = replica
        self.hit = replica.known.hit(prompt)
        self._unread = prompt.size - self.hit
        self._ahead = replica.reading + self._unread
        self._start_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_measured = prompt.is_streamed
        replica.reading += self._unread
        replica.known.note(prompt)
        if not prompt.is_streamed:
            # Its first byte says nothing of reading: it comes when all is written.
            self._timer = asyncio.get_running_loop().call_later(line.at(self._ahead), self.end_reading)

    def begun(self, *, is_error: bool = False) -> float:
        """Note that the first byte has come; return after how many seconds.

        An error says nothing of reading: a client without a key is refused in no time.
        """
        took_s = time.monotonic() - self._start_s
        if self._is_measured and not is_error:
            self._replica.measured.add(self._ahead, took_s, time.monotonic())
        self.end_reading()
        return took_s

    def has_read(self) -> None:
        """Note that the prompt is read, of a request that writes nothing."""
        self._is_measured = True
        self.begun()

    def end_reading(self) -> None:
        """Count its prompt as read."""
        if self._timer:
            self._timer.cancel()
        self._replica.reading -= self._unread
        self._unread = 0


class Fleet:
    """All replicas."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self.replicas: list[Replica] = []
        self.replace(addresses)

    def replace(self, addresses: Sequence[Address]) -> tuple[list[Replica], list[Replica]]:
        """Add and remove replicas so that there are these; return both. Those that stay are not touched."""
        before = {own.address: own for own in self.replicas}
        self.replicas = [before.get(address) or Replica(address) for address in addresses]
        added = [own for own in self.replicas if own.address not in before]
        return added, [own for own in before.values() if own not in self.replicas]

    def lines(self, replicas: Sequence[Replica]) -> list[Line]:
        """Return how long each of some replicas of one role takes to read, by what was measured lately.

        Where little was, all of them together stand in: a replica that was slow once is tried again.
        """
        now_s = time.monotonic()
        sums = [own.measured.sums(now_s) for own in replicas]
        together = fitted(added(sums), START, ASSUMED)
        return [fitted(own, together) for own in sums]

    def up(self, *roles: Role) -> list[Replica]:
        """List the replicas of these roles that are up."""
        return [own for own in self.replicas if own.is_up and own.address.role in roles]

    @property
    def is_ready(self) -> bool:
        """Return whether any replica can write an answer."""
        return bool(self.up(Role.BOTH, Role.DECODE))
