"""What a scrape reads of prompts that were lent and fetched."""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.reach.carrier import CarrierFigures
from specdec.reach.leases import BookFigures
from specdec.reach.peers import PeersFigures
from specdec.server.engine_figures import Labels


class ReachFigures(Collector):
    """Reads the counters of a server that has a role; names begin with `specdec:reach_`."""

    def __init__(self, sources: "Sources", labels: Labels) -> None:
        self.sources, self.labels = sources, labels
