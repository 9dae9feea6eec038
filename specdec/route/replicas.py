"""The replicas, and what the router knows of each. All of it is owned by the event loop's thread."""

import asyncio
import logging
from collections.abc import Sequence

from specdec.ray.load import Load
from specdec.route.addresses import Address, Role

logger = logging.getLogger(__name__)


class Replica(Load):
    """One `specdec serve`. It is down until its first check succeeds."""

    def __init__(self, address: Address) -> None:
        super().__init__(address.url)
        self.address = address
        self.is_up = False
        self.models: frozenset[str] = frozenset()
        """Names of its models, as reported; empty if it reports none."""
        self.told_role: str | None = None
        """Its role for disaggregated serving, as reported; None before the first check."""
        self.wake = asyncio.Event()
        """Set to have it checked at once."""
        self._failed = self._succeeded = 0

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

    def up(self, *roles: Role) -> list[Replica]:
        """List the replicas of these roles that are up."""
        return [own for own in self.replicas if own.is_up and own.address.role in roles]

    @property
    def is_ready(self) -> bool:
        """Return whether any replica can write an answer."""
        return bool(self.up(Role.BOTH, Role.DECODE))
