"""What a scrape reads of prompts that are lent and fetched."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.reach.carrier import CarrierFigures
from specdec.reach.fetch import FetchFigures
from specdec.reach.leases import BookFigures
from specdec.reach.peers import PeersFigures
from specdec.server.engine_figures import Labels
from specdec.server.reach.reach import Reach


class ReachFigures(Collector):
    """Reads the counters of a server that has a role."""

    def __init__(self, reach: Reach, labels: Labels) -> None:
        self.reach, self.labels = reach, labels

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("role", "1 for the server's role.", {self.reach.role: 1}, "role")
        yield from self._lending(self.reach.book.figures)
        yield from self._fetching(self.reach.fetched, self.reach.unasked)
        yield from self._peers(self.reach.peers.figures)
        yield from self._carrier(self.reach.carrier.figures)

    def _lending(self, own: BookFigures) -> Iterator[Metric]:
        yield self._gauge("leases", "Prompts that are read, or held, for other servers.", own.held)
        yield self._gauge(
            "leased_bytes",
            "Bytes of the arena that these take; a small prompt counts as 1/1024 of what may be lent.",
            own.held_bytes,
        )
        yield self._gauge("rooms_waiting", "Requests of other servers for rooms.", own.rooms_waiting)
        yield self._counter("lent", "Prompts that were to be read for other servers.", own.lent)
        ended: dict[str, int] = {
            "read": own.closed_intact,
            "not_intact": own.closed_not_intact,
            "not_wanted": own.closed_unread,
            **plain(own.ended),
        }
        says = "Leases that are over: read, taken back before that, not wanted, or by why not."
        yield self._counter("leases_ended", says, ended, "how")
        yield self._counter(
            "refused", "Requests of the side channel that were refused.", plain(own.refused), "reason"
        )

    def _fetching(self, own: FetchFigures, unasked: Mapping[str, int]) -> Iterator[Metric]:
        says = "Prompts that were to be fetched, by what became of it; all but fetched ones are read here."
        yield self._counter("fetches", says, plain(own.outcomes) | plain(unasked), "outcome")
        yield self._gauge("fetching", "Prompts that are being fetched.", own.under_way)
        yield self._counter("fetched_tokens", "Prompt tokens that were fetched.", own.tokens)
        yield self._counter("fetched_bytes", "Bytes that these had.", own.num_bytes)
        yield self._counter("fetch_seconds", "Seconds that fetches took; they overlap.", own.seconds)

    def _peers(self, own: PeersFigures) -> Iterator[Metric]:
        known: Mapping[str, int] = {"up": own.up, "refused": own.refused_peers}
        says = "Servers that prompts are fetched from, and those with another model or version."
        yield self._gauge("peers", says, known, "state")
        yield self._gauge("holds", "Prompts that are held elsewhere for requests here.", own.held)
        yield self._counter("handshakes", "Handshakes with other servers.", own.handshakes)
        yield self._counter("beats", "Beats that keep leases alive.", own.beats)
        yield self._counter("failures", "Calls of other servers that failed.", plain(own.failures), "reason")

    def _carrier(self, own: CarrierFigures) -> Iterator[Metric]:
        yield self._counter("reads", "Transfers of memory that came whole.", own.reads)
        yield self._counter("read_bytes", "Bytes that they had.", own.bytes)
        yield self._counter("read_seconds", "Seconds that they took; they overlap.", own.seconds)
        yield self._counter("reads_lost", "Transfers that were given up or failed.", own.lost)
        yield self._gauge("quarantined", "Lost transfers whose bytes may still come.", own.quarantined)
        yield self._gauge("quarantined_bytes", "Memory that serves nothing meanwhile.", own.quarantined_bytes)
        yield self._counter("agents_renewed", "Times that this ended by a new agent.", own.agents)

    def _gauge(self, name: str, says: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._filled(GaugeMetricFamily(*self._head(name, says, label)), value)

    def _counter(self, name: str, says: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self._filled(CounterMetricFamily(*self._head(name, says, label)), value)

    def _head(self, name: str, says: str, label: str) -> tuple[str, str, None, list[str]]:
        return f"specdec:reach_{name}", says, None, [*self.labels, *([label] if label else [])]

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[str, float]
    ) -> Metric:
        values = self.labels.values()
        if isinstance(value, Mapping):
            for key, own in dict(value).items():
                family.add_metric([*values, key], float(own))
        else:
            family.add_metric(list(values), float(value))
        return family


def plain(counts: Mapping[Any, int]) -> dict[str, int]:
    """Return counts as they are now: the scrape is written later."""
    return {str(key): count for key, count in counts.items()}
