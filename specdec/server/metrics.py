"""What a Prometheus scrape reads, by the names that dashboards for vLLM know."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specdec.engine import SpecEngine
from specdec.server.answers import Said
from specdec.state_slots.arena import ArenaUsage

FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
)
BETWEEN = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts what requests see; what the engine counts itself is read when somebody asks."""

    def __init__(self, engine: SpecEngine, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = {"model_name": model}
        self.registry.register(_Engine(engine, self._labels))

        def histogram(name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            own = Histogram(name, says, ["model_name"], buckets=buckets, registry=self.registry)
            found: Histogram = own.labels(**self._labels)
            return found

        self.first_s = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST
        )
        self.between_s = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens; those of one step share its time.", BETWEEN
        )
        self.whole_s = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", WHOLE)
        self.read = histogram("vllm:request_prompt_tokens", "Tokens read of a request.", TOKENS)
        self.written = histogram("vllm:request_generation_tokens", "Tokens written of a choice.", TOKENS)
        self.ended = Counter(
            "vllm:request_success",
            "Choices that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.read_total = Counter(
            "vllm:prompt_tokens", "Tokens read of prompts.", ["model_name"], registry=self.registry
        ).labels(**self._labels)
        self.written_total = Counter(
            "vllm:generation_tokens", "Tokens written.", ["model_name"], registry=self.registry
        ).labels(**self._labels)

    @contextlib.contextmanager
    def request(self, prompt_tokens: int) -> Iterator["Watch"]:
        """Watch one request from here to its end, whatever that is."""
        self.read.observe(prompt_tokens)
        self.read_total.inc(prompt_tokens)
        watch = Watch(self)
        try:
            yield watch
        finally:
            self.whole_s.observe(time.perf_counter() - watch.start_s)

    def ends(self, why: str) -> None:
        self.ended.labels(**self._labels, finished_reason=why).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(slots=True)
class Watch:
    """When the choices of one request said something."""

    metrics: Metrics
    start_s: float = field(default_factory=time.perf_counter)
    _last_s: dict[int, float] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)

    def said(self, said: Said) -> None:
        """Note a part of a choice: when the engine said what, not when it was looked at."""
        choice, delta, steps = said
        self.metrics.written_total.inc(len(delta.token_ids))
        self._tokens[choice] = self._tokens.get(choice, 0) + len(delta.token_ids)
        for at_s, count in steps:
            if not count:
                continue
            if choice not in self._last_s:
                self.metrics.first_s.observe(at_s - self.start_s)
            gap_s = (at_s - self._last_s.get(choice, at_s)) / count
            for _ in range(count - (choice not in self._last_s)):
                self.metrics.between_s.observe(gap_s)
            self._last_s[choice] = at_s
        if delta.finish_reason:
            self.metrics.ends(delta.finish_reason)
            self.metrics.written.observe(self._tokens[choice])


class _Engine(Collector):
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
        yield gauge("vllm:kv_cache_usage_perc", "Part of the arena that is in use.", _share(arena))
        held = {"kv": arena.block_bytes, "state": arena.state_bytes, "draft": arena.record_bytes}
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
        yield counter("specdec:steps", "Verify steps, each row's own.", {"": float(counts.steps)})
        yield counter("specdec:step_tokens", "Tokens that those steps wrote.", {"": float(counts.tokens)})
        yield counter("specdec:step_seconds", "Their time by phase.", dict(counts.seconds), "phase")
        yield counter(
            "specdec:limited",
            "Steps in which something was short, by what.",
            _floats(stats.limited_by),
            "what",
        )


def _share(arena: ArenaUsage) -> float:
    return (arena.block_bytes + arena.state_bytes + arena.record_bytes) / arena.capacity_bytes


def _floats(counts: dict[str, int]) -> dict[str, float]:
    return {name: float(count) for name, count in counts.items()}
