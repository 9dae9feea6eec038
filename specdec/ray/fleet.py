"""The ingress's view of all replicas, and one request's way through them."""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from specdec.ray.choose import Choice, choose
from specdec.ray.load import Flight, Load, fit_lines
from specdec.ray.prompts import Prompt

MOST_OWNED = 100_000
"""Maximum stored responses whose replica is remembered."""
Reports = Mapping[str, tuple[str, Mapping[str, float]]]
"""URL and routing statistics by replica id, as Ray knows them."""


class Fleet:
    """Loads of the replicas. Owned by the ingress's event loop."""

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor
        self.loads: dict[str, Load] = {}
        self.urls: dict[str, str] = {}
        self._owners: OrderedDict[str, str] = OrderedDict()

    def note(self, reports: Reports) -> None:
        """Take over what Ray knows: replicas added and removed, and their reports."""
        self.urls = {name: url for name, (url, _) in reports.items()}
        self.loads = {name: self.loads.get(name) or Load(name) for name in reports}
        for name, (_, stats) in reports.items():
            load = self.loads[name]
            load.waiting, load.arena = stats.get("waiting", 0.0), stats.get("arena", 0.0)

    def choose(self, prompt: Prompt, loads: list[Load]) -> Choice[Load] | None:
        return choose(loads, prompt, self._load_factor)

    def own(self, response: str, replica: str) -> None:
        """Remember which replica stored a response."""
        self._owners[response] = replica
        while len(self._owners) > MOST_OWNED:
            self._owners.popitem(last=False)

    def owner(self, response: str | None) -> str | None:
        """Return the replica that stored a response, if it is still there."""
        found = self._owners.get(response or "")
        return found if found in self.loads else None


class Asked:
    """One request: replicas that were tried, and its flight at the chosen one.

    It is the argument of `choose_replica`, which Ray hands to the router by reference.
    """

    def __init__(self, fleet: Fleet, prompt: Prompt, only: str | None = None) -> None:
        self.fleet, self.prompt, self.loop = fleet, prompt, asyncio.get_running_loop()
        self.only = only
        self.tried: set[str] = set()
        self.flight: Flight | None = None
        self.is_choosing = False

    async def order(self, reports: Reports) -> list[str]:
        """Return replica ids by preference, and count the request at the first one at once.

        Other requests are chosen for before this one is sent.
        """
        self.fleet.note(reports)
        untried = [own for name, own in self.fleet.loads.items() if name not in self.tried]
        mine = [own for own in untried if own.name == self.only]
        choice = self.fleet.choose(self.prompt, mine or untried)
        if choice is None or not self.is_choosing:  # all were tried, or the client is gone
            return list(reports)
        self.take(choice.replica.name)
        return [choice.replica.name, *(own.name for own in untried if own is not choice.replica)]

    def take(self, name: str) -> Flight:
        """Count the request at a replica; Ray takes another one if the first has no free slot."""
        if self.flight and self.flight.load.name == name:
            return self.flight
        self.end()
        load = self.fleet.loads.get(name) or Load(name)
        self.flight = Flight(load, self.prompt, fit_lines([load])[0])
        return self.flight

    def end(self) -> None:
        """Remove the request from its replica's load."""
        if self.flight:
            self.flight.end()
        self.flight = None
