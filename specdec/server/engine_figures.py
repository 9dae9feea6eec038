"""What the engine counts itself, read whenever figures are asked for, by vLLM's names where it has any."""

import re
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specdec.engine.engine import SpecEngine

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
OLDER = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
"""What vLLM called figures before it renamed them: dashboards ask for one or the other."""


class EngineFigures(Collector):
    """Reads the engine's own counts. It steps meanwhile: numbers may be a step apart."""

    def __init__(self, engine: SpecEngine, labels: dict[str, str]) -> None:
        self.engine, self.labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats, counts = self.engine.stats(), self.engine.model.loop.counts
        arena, names, values = stats.arena, list(self.labels), list(self.labels.values())

        def gauge(name: str, says: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, says, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, says: str, by: dict[str, float], label: str | None = None) -> Metric:
            family = CounterMetricFamily(name, says, labels=[*names, *([label] if label else [])])
            for key, value in by.items():
                family.add_metric([*values, *([key] if label else [])], value)
            return family

        yield gauge("vllm:num_requests_running", "Sequences that take part in steps.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait for memory or a place.", stats.waiting)
        share = arena.used_bytes / arena.capacity_bytes
        yield from self._state(stats.waiting)
        yield self._sizes(counts.sizes.copy())
        yield gauge("vllm:kv_cache_usage_perc", "Part of the arena that requests use.", share)
        held = {"kv": arena.block_bytes, "state": arena.state_bytes, "draft": arena.record_bytes}
        held["prefix"] = arena.kept_bytes
        family = GaugeMetricFamily("specdec:arena_bytes", "Bytes in use by kind.", labels=[*names, "kind"])
        for kind, used in (held | {"free": arena.free_bytes}).items():
            family.add_metric([*values, kind], used)
        yield family
        yield counter(
            "vllm:num_preemptions", "Sequences whose memory was taken back.", {"": stats.preemptions}
        )
        yield counter(
            "vllm:spec_decode_num_drafts", "Drafts that were verified.", {"": float(sum(counts.reached[:1]))}
        )
        yield counter("vllm:spec_decode_num_draft_tokens", "Tokens in them.", {"": float(counts.drafted)})
        yield counter(
            "vllm:spec_decode_num_accepted_tokens", "Of those, accepted.", {"": float(counts.accepted)}
        )
        followed = {str(depth): float(count) for depth, count in enumerate(counts.followed)}
        yield counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted by place in the draft, from 0.",
            followed,
            "position",
        )
        yield counter(
            "specdec:failed_steps",
            "Steps that failed; those who took part were told.",
            {"": float(stats.failed_steps)},
        )
        yield counter(
            "specdec:clean_checks",
            "Times that all was done and memory was proved empty and whole.",
            {"": float(stats.clean_checks)},
        )
        yield counter("specdec:moved_blocks", "Blocks moved together.", {"": float(stats.moved_blocks)})
        if kept := stats.prefixes:
            yield counter("vllm:prefix_cache_queries", "Tokens looked up.", {"": float(kept.asked)})
            yield counter("vllm:prefix_cache_hits", "Tokens that need not be read.", {"": float(kept.hit)})
            yield counter("specdec:prefix_fetched", "Of those, from the host.", {"": float(kept.fetched)})
            yield gauge(
                "specdec:prefix_bytes",
                "Bytes of the arena that kept prefixes hold; evicted on demand.",
                kept.cached_bytes,
            )
            yield gauge("specdec:prefix_alpha", "Weight of the work saved beside recency.", kept.alpha)
            evicted = {"state": float(kept.states_evicted), "kv": float(kept.blocks_evicted)}
            yield counter(
                "specdec:prefix_evicted",
                "States and KV blocks that were evicted or flushed.",
                evicted,
                "kind",
            )
        yield counter("specdec:steps", "Verify steps, each row's own.", {"": float(counts.steps)})
        yield counter("specdec:step_tokens", "Tokens that those steps wrote.", {"": float(counts.tokens)})
        yield counter("specdec:step_seconds", "Their time by phase.", dict(counts.seconds), "phase")
        yield counter(
            "specdec:limited",
            "Steps in which something was short, by what.",
            _floats(stats.limited_by),
            "what",
        )

    def _state(self, waiting: int) -> Iterator[Metric]:
        """Say in vLLM's words what state the engine is in: always awake, and short of one thing alone."""
        for name, says, label, values in (
            ("num_requests_waiting_by_reason", "Sequences that wait.", "reason", {"capacity": waiting}),
            ("engine_sleep_state", "1: the engine is awake.", "sleep_state", {"awake": 1}),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", says, labels=[*self.labels, label])
            for key, value in values.items():
                family.add_metric([*self.labels.values(), key], value)
            yield family
        settings = self.engine.model.settings
        layout = settings.layout
        told = {
            "block_size": layout.block_tokens,
            "cache_dtype": str(layout.page_dtype).removeprefix("torch."),
            "enable_prefix_caching": settings.prefix_cache,
            "num_gpu_blocks": settings.memory_bytes // layout.slab_bytes * layout.blocks_per_slab,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "How memory is used.", labels=[*self.labels, *told]
        )
        info.add_metric([*self.labels.values(), *map(str, told.values())], 1)
        yield info

    def _sizes(self, sizes: Counter[int]) -> Metric:
        """Sum steps by their size up to each bound."""
        buckets = [(str(float(b)), sum(n for size, n in sizes.items() if size <= b)) for b in STEP_TOKENS]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens read and written by a step.", labels=list(self.labels)
        )
        whole = sum(size * count for size, count in sizes.items())
        family.add_metric(list(self.labels.values()), [*buckets, ("+Inf", sizes.total())], whole)
        return family


def renamed(text: bytes) -> bytes:
    """Repeat the figures of `OLDER` by the names that earlier dashboards ask for."""
    lines = text.split(b"\n")
    again = []
    for name, older in OLDER.items():
        # What follows the name decides: a histogram has three series, a counter one that ends with _total.
        own = re.compile(
            rb"(# (?:HELP|TYPE) )?" + name.encode() + rb"(?=[ {]|_bucket|_sum|_count|_total|_created)"
        )
        again += [own.sub(rb"\1" + older.encode(), line, count=1) for line in lines if own.match(line)]
    return b"\n".join([*lines[:-1], *again, b""])


def _floats(counts: dict[str, int]) -> dict[str, float]:
    return {name: float(count) for name, count in counts.items()}
