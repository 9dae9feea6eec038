"""The router's figures, as Prometheus reads them."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.ray.load import fit_lines
from specdec.route.replicas import Fleet

FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
ADDED = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)


class RouteMetrics:
    """Counts what requests see, and shows what is known of the replicas."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_Replicas(fleet))
        ProcessCollector(registry=self.registry)
        self.answers = self._counter(
            "http_requests", "Responses by method and status class, without disconnected clients.",
            "method", "status",
        )  # fmt: skip
        self.sent = self._counter("specdec:route_requests", "Requests sent to a replica.", "replica")
        self.retried = self._counter(
            "specdec:route_retries", "Requests that a replica did not begin to answer, by cause.", "why"
        )
        self.broken = self._counter("specdec:route_broken", "Truncated answers, by who ended them.", "who")
        self.read = self._counter(
            "specdec:route_prompt_bytes",
            "Bytes of prompts, by whether the replica has had them before.",
            "known",
        )
        self.apart = self._counter(
            "specdec:route_prefills", "Disaggregated requests, by who prefilled the prompt.", "reader"
        )
        self.first_s = self._histogram(
            "specdec:route_first_byte_seconds",
            "Seconds from sending a stream's request to its first byte.",
            FIRST,
        )
        self.added_s = self._histogram(
            "specdec:route_choice_seconds", "Seconds from the end of a request's body to its sending.", ADDED
        )

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(name, says, labels, registry=self.registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, says, buckets=buckets, registry=self.registry)

    def text(self) -> bytes:
        """Write all figures."""
        return generate_latest(self.registry)


class _Replicas(Collector):
    """What is known of each replica, at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def collect(self) -> Iterator[Metric]:
        replicas = self.fleet.replicas
        lines = fit_lines(replicas)
        told = {
            "up": ("1: the replica takes requests.", [float(own.is_up) for own in replicas]),
            "under_way": ("Its requests from this router.", [float(own.in_flight) for own in replicas]),
            "unread_bytes": (
                "Bytes of their prompts not prefilled yet.",
                [float(own.reading) for own in replicas],
            ),
            "waiting": ("Requests waiting there, as it reports.", [own.waiting for own in replicas]),
            "arena_usage": ("Its memory usage, as it reports.", [own.arena for own in replicas]),
            "fixed_seconds": (
                "Seconds to a first byte without prefill.",
                [own.fixed_s for own in lines],
            ),
            "seconds_per_byte": ("Seconds to prefill a byte of a prompt.", [own.per_byte_s for own in lines]),
        }
        for name, (says, values) in told.items():
            family = GaugeMetricFamily(f"specdec:route_replica_{name}", says, labels=["replica", "role"])
            for replica, value in zip(replicas, values, strict=True):
                family.add_metric([replica.url, replica.address.role], value)
            yield family
