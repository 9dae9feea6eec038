"""The engine's counters, read at each scrape, under vLLM's metric names where they exist."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.core.outputs import EngineStats, PrefixStats
from specdec.core.scheduler import RESOURCES
from specdec.core.stats import SpeculationCounts
from specdec.engine.engine import SpecEngine
from specdec.server.resident import ModelStatus, Resident
from specdec.setup.settings import Resolved

Labels = dict[str, str]

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTEXT = {
    "steps": "Verify steps by context length in tokens: up to 1024, 2048, 4096 and so on.",
    "tokens": "Tokens that verify steps emitted, by context length.",
    "drafted": "Drafted tokens by context length.",
    "accepted": "Accepted draft tokens by context length.",
}
"""Metrics by context length; a model's longest context bounds the number of labels."""
OLDER = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
"""Metrics renamed by vLLM, with their old names: dashboards query either."""


class EngineFigures(Collector):
    """Collects the counters of loaded models while they step: values may be a step apart."""

    def __init__(self, residents: Iterable[tuple[Resident, Labels]]) -> None:
        self.residents = residents

    def collect(self) -> Iterable[Metric]:
        """Yield every family once, with the series of all models."""
        families: dict[str, Metric] = {}
        for resident, labels in self.residents:
            for family in OneModel(resident, labels).collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        return families.values()


class OneModel:
    """Collects one model's state and, if loaded, its engine's counters."""

    def __init__(self, resident: Resident, labels: Labels) -> None:
        self.resident, self.labels = resident, labels

    def collect(self) -> Iterator[Metric]:
        status, resident = self.resident.status, self.resident
        states = {str(state): int(state is status) for state in ModelStatus}
        family = GaugeMetricFamily(
            "specdec:model_state", "1 for the model's current state.", labels=[*self.labels, "state"]
        )
        for state, is_there in states.items():
            family.add_metric([*self.labels.values(), state], is_there)
        yield family
        switches = "Times the model got an arena, by kind: load or wake."
        yield self._by("specdec:model_switches", switches, "kind", resident.switches)
        seconds = "Seconds of loading or waking, including freeing memory."
        yield self._by("specdec:model_switch_seconds", seconds, "kind", resident.switch_seconds)
        if resident.engine:
            yield from self._engine(resident.engine, is_awake=status is ModelStatus.WARM)

    def _engine(self, engine: SpecEngine, *, is_awake: bool) -> Iterator[Metric]:
        stats, counts = engine.stats(), engine.model.loop.counts
        yield self._gauge("vllm:num_requests_running", "Running sequences.", stats.running)
        yield self._gauge(
            "vllm:num_requests_waiting", "Sequences waiting for memory or a slot.", stats.waiting
        )
        yield from self._state(engine.model.settings, stats.waiting, is_awake=is_awake)
        yield self._sizes(counts.sizes.copy())
        yield from self._memory(stats)
        yield from self._speculation(counts)
        yield from self._health(stats)
        if stats.prefixes:
            yield from self._prefixes(stats.prefixes)
        yield self._counter("specdec:steps", "Verify steps, summed over rows.", counts.steps)
        yield self._counter("specdec:step_tokens", "Tokens that verify steps emitted.", counts.tokens)
        yield self._by("specdec:step_seconds", "Seconds of verify steps by phase.", "phase", counts.seconds)
        resources = {**dict.fromkeys(RESOURCES, 0), **stats.limited_by}
        limited = "Steps that a resource limited, by resource."
        yield self._by("specdec:limited", limited, "what", resources)

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, description, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), value)
        return family

    def _counter(self, name: str, description: str, value: float) -> Metric:
        family = CounterMetricFamily(name, description, labels=list(self.labels))
        family.add_metric(list(self.labels.values()), float(value))
        return family

    def _by(self, name: str, description: str, label: str, counts: Mapping[str, float]) -> Metric:
        """Return a counter with a further label."""
        family = CounterMetricFamily(name, description, labels=[*self.labels, label])
        for key, value in dict(counts).items():
            family.add_metric([*self.labels.values(), key], float(value))
        return family

    def _memory(self, stats: EngineStats) -> Iterator[Metric]:
        arena = stats.arena
        usage = arena.used_bytes / arena.capacity_bytes
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache and state memory that requests use.", usage
        )
        used_bytes = {
            "kv": arena.block_bytes,
            "state": arena.state_bytes,
            "draft": arena.record_bytes,
            "prefix": arena.cached_bytes,
            "free": arena.free_bytes,
        }
        family = GaugeMetricFamily(
            "specdec:arena_bytes", "Bytes in use by kind.", labels=[*self.labels, "kind"]
        )
        for kind, used in used_bytes.items():
            family.add_metric([*self.labels.values(), kind], used)
        yield family
        yield self._counter("vllm:num_preemptions", "Preemptions of sequences.", stats.preemptions)

    def _speculation(self, counts: SpeculationCounts) -> Iterator[Metric]:
        drafts = sum(counts.reached[:1])
        yield self._counter("vllm:spec_decode_num_drafts", "Verified drafts.", drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", counts.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", counts.accepted)
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft, from 0.",
            "position",
            {str(depth): count for depth, count in enumerate(counts.followed)},
        )

        contexts = {str(bound): totals for bound, totals in counts.by_context().items()}
        for name, description in CONTEXT.items():
            values = {bound: getattr(totals, name) for bound, totals in contexts.items()}
            yield self._by(f"specdec:context_{name}", description, "context", values)

    def _health(self, stats: EngineStats) -> Iterator[Metric]:
        failed = "Failed engine steps."
        yield self._counter("specdec:failed_steps", failed, stats.failed_steps)
        clean = "Idle checks that memory was empty and consistent."
        yield self._counter("specdec:clean_checks", clean, stats.clean_checks)
        yield self._counter(
            "specdec:moved_blocks", "KV blocks moved to free whole slabs.", stats.moved_blocks
        )

    def _prefixes(self, stats: PrefixStats) -> Iterator[Metric]:
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.asked
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.hit)
        yield self._counter(
            "specdec:prefix_fetched", "Cache hits fetched from the host's memory.", stats.fetched
        )
        cached_help = "Bytes of the arena that cached prefixes hold; evicted on demand."
        yield self._gauge("specdec:prefix_bytes", cached_help, stats.cached_bytes)
        yield self._gauge(
            "specdec:prefix_alpha", "Weight of saved work against recency in the eviction score.", stats.alpha
        )
        evicted = {"state": stats.states_evicted, "kv": stats.blocks_evicted}
        evicted_help = "States and KV blocks that were evicted or flushed."
        yield self._by("specdec:prefix_evicted", evicted_help, "kind", evicted)

    def _state(self, settings: Resolved, waiting: int, *, is_awake: bool) -> Iterator[Metric]:
        """Yield the engine's state as in vLLM: awake or not, waiting only for capacity."""
        for name, description, label, values in (
            (
                "num_requests_waiting_by_reason",
                "Waiting sequences by reason.",
                "reason",
                {"capacity": waiting},
            ),
            ("engine_sleep_state", "1: the engine is awake.", "sleep_state", {"awake": int(is_awake)}),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", description, labels=[*self.labels, label])
            for key, value in values.items():
                family.add_metric([*self.labels.values(), key], value)
            yield family
        layout = settings.layout
        cache_config = {
            "block_size": layout.block_tokens,
            "cache_dtype": str(layout.page_dtype).removeprefix("torch."),
            "enable_prefix_caching": settings.config.prefix_cache,
            "num_gpu_blocks": settings.memory_bytes // layout.slab_bytes * layout.blocks_per_slab,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the cache.", labels=[*self.labels, *cache_config]
        )
        info.add_metric([*self.labels.values(), *map(str, cache_config.values())], 1)
        yield info

    def _sizes(self, sizes: Counter[int]) -> Metric:
        buckets = [(str(float(b)), sum(n for size, n in sizes.items() if size <= b)) for b in STEP_TOKENS]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens processed in a step.", labels=list(self.labels)
        )
        total = sum(size * count for size, count in sizes.items())
        family.add_metric(list(self.labels.values()), [*buckets, ("+Inf", sizes.total())], total)
        return family


def renamed(text: bytes) -> bytes:
    """Append the metrics in `OLDER` under their old names."""
    lines = text.split(b"\n")
    aliases = []
    for name, alias in OLDER.items():
        # The suffix decides: a histogram has three series, a counter one that ends with _total.
        pattern = re.compile(
            rb"(# (?:HELP|TYPE) )?" + name.encode() + rb"(?=[ {]|_bucket|_sum|_count|_total|_created)"
        )
        aliases += [
            pattern.sub(rb"\1" + alias.encode(), line, count=1) for line in lines if pattern.match(line)
        ]
    return b"\n".join([*lines[:-1], *aliases, b""])
