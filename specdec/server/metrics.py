"""Prometheus metrics under vLLM's names."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from specdec.core.outputs import RequestStats
from specdec.core.params import PreparedPrompt
from specdec.errors import RequestError
from specdec.server.answers import NewOutput
from specdec.server.engine_figures import EngineFigures, Labels, renamed
from specdec.server.failures import Failure
from specdec.server.resident import Resident

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
CHOICES = (1, 2, 5, 10, 20, 50, 100)
REASONS = ("stop", "length", "abort", "error")
SCRAPE_REST = 20.0
"""Seconds of pause per CPU second of generating metrics. Without it, eight clients that polled /metrics cut
another key's stream from 185 to 28 events per second (`tiny`, two shared cores)."""
OUTSIDE = (Failure, ConnectionError, asyncio.CancelledError, RequestError)
"""Exceptions that end a choice from outside: timeout, shutdown, or the client's disconnect or error."""


def labels_of(model: str) -> Labels:
    """Return the labels of a model's series, as in vLLM."""
    return {"model_name": model, "engine": "0"}


class Metrics:
    """All metrics: request counts by model, and the engines' counters."""

    def __init__(self, residents: Sequence[Resident]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(
            EngineFigures([(resident, labels_of(resident.name)) for resident in residents])
        )
        ProcessCollector(registry=self.registry)
        self.answers = Counter(
            "http_requests",
            "Responses by route, method and status class, without those of disconnected clients.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self._families: dict[str, Any] = {}
        self._scrape: asyncio.Task[bytes] | None = None
        self._rests_until_s = 0.0

    def of(self, model: str) -> "ModelMetrics":
        """Return a model's metrics."""
        return ModelMetrics(self, labels_of(model))

    def histogram(self, name: str, description: str, buckets: tuple[float, ...], labels: Labels) -> Histogram:
        """Return a model's histogram, creating its family if needed."""
        if name not in self._families:
            self._families[name] = Histogram(
                name, description, list(labels), buckets=buckets, registry=self.registry
            )
        histogram: Histogram = self._families[name].labels(**labels)
        return histogram

    def counter(self, name: str, description: str, labels: Labels) -> Counter:
        """Return a model's counter, creating its family if needed."""
        if name not in self._families:
            self._families[name] = Counter(name, description, list(labels), registry=self.registry)
        counter: Counter = self._families[name].labels(**labels)
        return counter

    def answered(self, path: str, method: str, status: int) -> None:
        """Count a response of a route."""
        self.answers.labels(handler=path, method=method, status=f"{status // 100}xx").inc()

    async def scrape(self) -> bytes:
        """Return all metrics; scrapes during a pause share one text generated after it."""
        if self._scrape is None:
            self._scrape = asyncio.create_task(self._delayed_text())
        return await asyncio.shield(self._scrape)

    async def _delayed_text(self) -> bytes:
        await asyncio.sleep(self._rests_until_s - time.monotonic())
        self._scrape = None
        start_s = time.thread_time()
        text = self.text()
        self._rests_until_s = time.monotonic() + SCRAPE_REST * (time.thread_time() - start_s)
        return text

    def text(self) -> bytes:
        """Return all metrics, renamed ones under both names."""
        return renamed(generate_latest(self.registry))


class ModelMetrics:
    """Request metrics of one model.

    As in vLLM each choice counts as a request: n choices of a prompt are n times, n lengths and n prompts. A
    choice that was ended from outside only counts its reason, and its first token if there was one.
    """

    def __init__(self, metrics: Metrics, labels: Labels) -> None:
        self.shared, self._labels = metrics, labels
        self._add_times()
        self._add_tokens()
        description = "Finished requests by reason: abort is external, error a failure."
        self.ended = {
            reason: metrics.counter(
                "vllm:request_success", description, {**labels, "finished_reason": reason}
            )
            for reason in REASONS
        }

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return self.shared.histogram(f"vllm:{name}", description, buckets, self._labels)

    def _counter(self, name: str, description: str) -> Counter:
        return self.shared.counter(f"vllm:{name}", description, self._labels)

    def _add_times(self) -> None:
        self.first_s = self._histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", FIRST
        )
        self.between_s = self._histogram(
            "inter_token_latency_seconds",
            "Seconds between tokens; tokens of one step share its time.",
            BETWEEN,
        )
        self.whole_s = self._histogram(
            "e2e_request_latency_seconds", "Seconds from arrival to the last token.", WHOLE
        )
        self.queued_s = self._histogram(
            "request_queue_time_seconds", "Seconds spent waiting before the first step.", FIRST
        )
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds",
            "Seconds of prefill: from the first step to the first token.",
            FIRST,
        )
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "Seconds of decoding: from the first to the last token.", WHOLE
        )
        self.ran_s = self._histogram(
            "request_inference_time_seconds", "Seconds of prefill and decoding together.", WHOLE
        )
        self.token_s = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per output token after the first.", BETWEEN
        )

    def _add_tokens(self) -> None:
        self.read = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.written = self._histogram("request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that were not found in the prefix cache.",
            TOKENS,
        )
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of a prompt's longest choice.", TOKENS
        )
        self.allowed = self._histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self.choices = self._histogram("request_params_n", "n of a request.", CHOICES)
        self.read_total = self._counter("prompt_tokens", "Prompt tokens, counted when prefill is done.")
        self.cached_total = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.written_total = self._counter("generation_tokens", "Generated tokens.")

    @contextlib.contextmanager
    def request(self, prepared: Sequence[PreparedPrompt], start_s: float) -> Iterator["RequestTracker"]:
        """Track the choices of some prompts from their arrival to their end."""
        watch = RequestTracker(self, prepared, start_s)
        try:
            yield watch
        except BaseException as error:
            watch.fail(error)
            raise
        finally:
            watch.close()


class RequestTracker:
    """Tracks choices submitted together."""

    def __init__(self, metrics: ModelMetrics, prepared: Sequence[PreparedPrompt], start_s: float) -> None:
        self.metrics, self.prepared, self.start_s = metrics, prepared, start_s
        self._reason = ""
        """Reason of choices ended from outside."""
        self._last_s: dict[int, float] = {}
        self._ended: list[list[int]] = [[] for _ in prepared]
        """Per prompt: token counts of its finished choices."""

    def said(self, output: NewOutput) -> None:
        """Record a choice's delta at the time the engine produced it."""
        choice, delta, steps = output
        prompt = choice // self.prepared[0].params.n
        self.metrics.written_total.inc(len(delta.token_ids))
        for at_s, count in steps:
            if not count:
                continue
            if choice not in self._last_s:
                self.metrics.first_s.observe(at_s - self.start_s)
                self.metrics.read_total.inc(len(self.prepared[prompt].ids))
            gap_s = (at_s - self._last_s.get(choice, at_s)) / count
            for _ in range(count - (choice not in self._last_s)):
                self.metrics.between_s.observe(gap_s)
            self._last_s[choice] = at_s
        if delta.finish_reason and delta.stats:
            if choice not in self._last_s:  # only a prefill was requested
                self.metrics.read_total.inc(len(self.prepared[prompt].ids))
            self.metrics.ended[delta.finish_reason].inc()
            self.metrics.whole_s.observe(steps[-1][0] - self.start_s)
            self._end(prompt, delta.stats)

    def _end(self, prompt: int, stats: RequestStats) -> None:
        """Record the statistics of a finished choice."""
        metrics, params, ended = self.metrics, self.prepared[prompt].params, self._ended[prompt]
        decode_s, tokens = stats.total_s - stats.first_token_s, stats.output_tokens
        metrics.queued_s.observe(stats.queued_s)
        metrics.prefill_s.observe(stats.first_token_s - stats.queued_s)
        metrics.decode_s.observe(decode_s)
        metrics.ran_s.observe(stats.total_s - stats.queued_s)
        if tokens > 1:
            metrics.token_s.observe(decode_s / (tokens - 1))
        metrics.read.observe(stats.prompt_tokens)
        metrics.computed.observe(stats.prompt_tokens - stats.cached_tokens)
        metrics.cached_total.inc(stats.cached_tokens)
        metrics.written.observe(tokens)
        metrics.allowed.observe(params.max_tokens)
        ended.append(tokens)
        if len(ended) == params.n:
            metrics.choices.observe(params.n)
            metrics.longest.observe(max(ended))

    def fail(self, error: BaseException) -> None:
        """Record the reason for ending the remaining choices; the first one counts."""
        self._reason = self._reason or ("abort" if isinstance(error, OUTSIDE) else "error")

    def close(self) -> None:
        """Count the choices that were ended from outside, by reason."""
        unfinished = sum(
            prompt.params.n - len(ended) for prompt, ended in zip(self.prepared, self._ended, strict=True)
        )
        if unfinished:
            self.metrics.ended[self._reason].inc(unfinished)
