"""Metrics of lent and fetched prompts."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.reach.carrier import CarrierFigures
from specdec.reach.fetch import FetchFigures
from specdec.reach.lease_table import LeaseFigures
from specdec.reach.peers import PeersFigures
from specdec.server.engine_figures import Labels
from specdec.server.reach.reach import Reach


class ReachFigures(Collector):
    """Collects the counters of a server with a role."""

    def __init__(self, reach: Reach, labels: Labels) -> None:
        self.reach, self.labels = reach, labels

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("role", "1 for the server's role.", {self.reach.role: 1}, "role")
        yield from self._lending(self.reach.book.figures)
        yield from self._fetching(self.reach.fetched, self.reach.unasked)
        yield from self._peers(self.reach.peers.figures)
        yield from self._carrier(self.reach.carrier.figures)

    def _lending(self, own: LeaseFigures) -> Iterator[Metric]:
        yield self._gauge("leases", "Prompts in prefill or held for other servers.", own.held)
        yield self._gauge(
            "leased_bytes",
            "Bytes of the arena for these; a small prompt counts as 1/1024 of the limit.",
            own.held_bytes,
        )
        yield self._gauge("rooms_waiting", "Requests waiting for rooms.", own.rooms_waiting)
        yield self._counter("lent", "Prompts to prefill for other servers.", own.lent)
        ended: dict[str, int] = {
            "read": own.closed_intact,
            "not_intact": own.closed_not_intact,
            "not_wanted": own.closed_unread,
            **plain(own.ended),
        }
        says = "Ended leases, by outcome."
        yield self._counter("leases_ended", says, ended, "how")
        yield self._counter("refused", "Refused requests of the side channel.", plain(own.refused), "reason")

    def _fetching(self, own: FetchFigures, unasked: Mapping[str, int]) -> Iterator[Metric]:
        says = "Prompts to fetch, by outcome; those not fetched are prefilled here."
        yield self._counter("fetches", says, plain(own.outcomes) | plain(unasked), "outcome")
        yield self._gauge("fetching", "Fetches in flight.", own.under_way)
        yield self._counter("fetched_tokens", "Fetched prompt tokens.", own.tokens)
        yield self._counter("fetched_bytes", "Bytes that these had.", own.num_bytes)
        yield self._counter("fetch_seconds", "Seconds of fetches; they overlap.", own.seconds)

    def _peers(self, own: PeersFigures) -> Iterator[Metric]:
        known: Mapping[str, int] = {"up": own.up, "refused": own.refused_peers}
        says = "Servers to fetch from, and those with another model or version."
        yield self._gauge("peers", says, known, "state")
        yield self._gauge("holds", "Prompts held elsewhere for requests here.", own.held)
        yield self._counter("handshakes", "Handshakes with other servers.", own.handshakes)
        yield self._counter("beats", "Beats that keep leases alive.", own.beats)
        yield self._counter("failures", "Calls of other servers that failed.", plain(own.failures), "reason")

    def _carrier(self, own: CarrierFigures) -> Iterator[Metric]:
        yield self._counter("reads", "Completed memory transfers.", own.reads)
        yield self._counter("read_bytes", "Bytes that they had.", own.bytes)
        yield self._counter("read_seconds", "Seconds of transfers; they overlap.", own.seconds)
        yield self._counter("reads_lost", "Failed or abandoned transfers.", own.lost)
        yield self._gauge("quarantined", "Lost transfers whose bytes may still arrive.", own.quarantined)
        yield self._gauge("quarantined_bytes", "Bytes quarantined for these.", own.quarantined_bytes)
        yield self._counter("agents_renewed", "Quarantines ended by a new agent.", own.agents)

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
    """Return a copy of counts, since the scrape is written later."""
    return {str(key): count for key, count in counts.items()}
