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

    def _lending(self, figures: LeaseFigures) -> Iterator[Metric]:
        yield self._gauge("leases", "Prompts in prefill or held for other servers.", figures.held)
        yield self._gauge(
            "leased_bytes",
            "Bytes of the arena for these; a small prompt counts as 1/1024 of the limit.",
            figures.held_bytes,
        )
        yield self._gauge("rooms_waiting", "Requests waiting for rooms.", figures.rooms_waiting)
        yield self._counter("lent", "Prompts to prefill for other servers.", figures.lent)
        outcomes: dict[str, int] = {
            "read": figures.closed_intact,
            "not_intact": figures.closed_not_intact,
            "not_wanted": figures.closed_unread,
            **plain(figures.ended),
        }
        description = "Ended leases, by outcome."
        yield self._counter("leases_ended", description, outcomes, "how")
        yield self._counter(
            "refused", "Refused requests of the side channel.", plain(figures.refused), "reason"
        )

    def _fetching(self, figures: FetchFigures, skipped: Mapping[str, int]) -> Iterator[Metric]:
        description = "Prompts to fetch, by outcome; those not fetched are prefilled here."
        yield self._counter("fetches", description, plain(figures.outcomes) | plain(skipped), "outcome")
        yield self._gauge("fetching", "Fetches in flight.", figures.under_way)
        yield self._counter("fetched_tokens", "Fetched prompt tokens.", figures.tokens)
        yield self._counter("fetched_bytes", "Bytes that these had.", figures.num_bytes)
        yield self._counter("fetch_seconds", "Seconds of fetches; they overlap.", figures.seconds)

    def _peers(self, figures: PeersFigures) -> Iterator[Metric]:
        counts: Mapping[str, int] = {"up": figures.up, "refused": figures.refused_peers}
        description = "Servers to fetch from, and those with another model or version."
        yield self._gauge("peers", description, counts, "state")
        yield self._gauge("holds", "Prompts held elsewhere for requests here.", figures.held)
        yield self._counter("handshakes", "Handshakes with other servers.", figures.handshakes)
        yield self._counter("beats", "Heartbeats that renew leases.", figures.beats)
        yield self._counter(
            "failures", "Calls of other servers that failed.", plain(figures.failures), "reason"
        )

    def _carrier(self, figures: CarrierFigures) -> Iterator[Metric]:
        yield self._counter("reads", "Completed memory transfers.", figures.reads)
        yield self._counter("read_bytes", "Bytes that they had.", figures.bytes)
        yield self._counter("read_seconds", "Seconds of transfers; they overlap.", figures.seconds)
        yield self._counter("reads_lost", "Failed or abandoned transfers.", figures.lost)
        yield self._gauge("quarantined", "Lost transfers whose bytes may still arrive.", figures.quarantined)
        yield self._gauge("quarantined_bytes", "Bytes quarantined for these.", figures.quarantined_bytes)
        yield self._counter("agents_renewed", "Quarantines ended by a new agent.", figures.agents)

    def _gauge(
        self, name: str, description: str, value: float | Mapping[str, float], label: str = ""
    ) -> Metric:
        return self._filled(GaugeMetricFamily(*self._head(name, description, label)), value)

    def _counter(
        self, name: str, description: str, value: float | Mapping[str, float], label: str = ""
    ) -> Metric:
        return self._filled(CounterMetricFamily(*self._head(name, description, label)), value)

    def _head(self, name: str, description: str, label: str) -> tuple[str, str, None, list[str]]:
        return f"specdec:reach_{name}", description, None, [*self.labels, *([label] if label else [])]

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[str, float]
    ) -> Metric:
        values = self.labels.values()
        if isinstance(value, Mapping):
            for key, number in dict(value).items():
                family.add_metric([*values, key], float(number))
        else:
            family.add_metric(list(values), float(value))
        return family


def plain(counts: Mapping[Any, int]) -> dict[str, int]:
    """Return a copy of counts, since the scrape is written later."""
    return {str(key): count for key, count in counts.items()}
