"""A server's speculation figures: from its streams, or from its Prometheus metrics around a run."""

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.bench.serve.stream import RequestOutcome

COUNTERS = "spec_decode_num_"
"""Prefix of vLLM's counters, after the engine's name; other engines use them too."""
GAUGES = ("sglang:spec_accept_length",)
"""Gauges of the recent acceptance length."""

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """Speculation figures of one run."""

    source: str
    """The source of the figures."""
    acceptance_length: float
    """Tokens per verify step, including the bonus token."""
    drafted: int | None = None
    accepted: int | None = None
    per_depth: tuple[float, ...] = ()
    """Acceptance rate of each depth, given that the previous one was accepted."""


Metrics = Mapping[tuple[str, int | None], float]
"""Values by name and, if labelled, position; counts are summed over other labels."""


def read_metrics(text: str) -> Metrics:
    """Parse the speculation metrics."""
    values: dict[tuple[str, int | None], list[float]] = {}
    for name, labels, value in _samples(text):
        kept = name.partition(":")[2].removesuffix("_total")
        if kept.startswith(COUNTERS) or name in GAUGES:
            place = _POSITION.search(labels)
            key = (name if name in GAUGES else kept, int(place[1]) if place else None)
            values.setdefault(key, []).append(value)
    return {key: _mean(x) if key[0] in GAUGES else sum(x) for key, x in values.items()}


def _mean(lengths: Sequence[float]) -> float:
    """Average an engine's replicas, ignoring those without a value."""
    return sum(lengths) / max(1, sum(length > 0 for length in lengths))


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        found = _LINE.fullmatch(line.strip())
        if found and not line.startswith("#"):
            try:
                yield found[1], found[2] or "", float(found[3])
            except ValueError:
                continue


def has_gauge(metrics: Metrics) -> bool:
    """Return whether a server has a gauge to sample during the run."""
    return any((name, None) in metrics for name in GAUGES)


def gauge(metrics: Metrics) -> float | None:
    """Return the current acceptance length; ignore 0, the value of an idle engine."""
    return next((metrics[name, None] for name in GAUGES if metrics.get((name, None))), None)


def told(
    outcomes: Sequence[RequestOutcome], before: Metrics, after: Metrics, lengths: Sequence[float]
) -> SpeculationFigures | None:
    """Choose the best source: the streams, then counters, then a gauge; None without any."""
    streamed, counted = _streamed(outcomes), _counted(before, after)
    if streamed and counted and counted.per_depth:
        source = f"{streamed.source}, by depth the server's counters"
        return replace(streamed, source=source, per_depth=counted.per_depth)
    return streamed or counted or _gauged(lengths)


def _streamed(outcomes: Sequence[RequestOutcome]) -> SpeculationFigures | None:
    """Sum the streams' counts. Each step gives one token that is not a draft, so those count the steps."""
    whole = [own for own in outcomes if own.failure is None and own.counted_by != "chunks"]
    drafts = [outcome.drafts for outcome in whole if outcome.drafts]
    drafted, accepted = (sum(getattr(own, name) for own in drafts) for name in ("drafted", "accepted"))
    # If some streams report drafts, the others had none.
    tokens = sum(outcome.tokens for outcome in whole)
    if not drafted or tokens <= accepted:
        return None
    source = f"the streams of {len(whole)} requests"
    return SpeculationFigures(source, tokens / (tokens - accepted), drafted, accepted)


def _counted(before: Metrics, after: Metrics) -> SpeculationFigures | None:
    """Return the growth of the counters, which cover all drafting steps of the server."""

    def grown(name: str, position: int | None = None) -> float:
        key = (f"{COUNTERS}{name}", position)
        return after.get(key, 0.0) - before.get(key, 0.0)

    steps, drafted, accepted = grown("drafts"), grown("draft_tokens"), grown("accepted_tokens")
    if steps <= 0 or drafted < 0 or accepted < 0:  # nothing was drafted, or the server was restarted
        return None
    reached = [steps]
    while (name := (f"{COUNTERS}accepted_tokens_per_pos", len(reached) - 1)) in after:
        reached.append(grown("accepted_tokens_per_pos", name[1]))
    rates = tuple(b / a for a, b in itertools.pairwise(reached) if a > 0)
    length = 1 + accepted / steps
    return SpeculationFigures("the server's counters", length, int(drafted), int(accepted), rates)


def _gauged(lengths: Sequence[float]) -> SpeculationFigures | None:
    if not lengths:
        return None
    source = f"the server's gauge of its last moments, median of {len(lengths)} readings"
    return SpeculationFigures(source, statistics.median(lengths))
