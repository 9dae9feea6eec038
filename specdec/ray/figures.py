"""Read what a replica reports about itself in /metrics."""

import re
from typing import NamedTuple

LINE = re.compile(
    rb"^(vllm:num_requests_waiting|vllm:num_requests_running|vllm:kv_cache_usage_perc|specdec:model_state"
    rb"|specdec:reach_role)(?:\{([^}\n]*)\})? ([0-9.eE+\-]+)",
    re.MULTILINE,
)
NAME = re.compile(rb'model_name="([^"\\]*)"')
ROLE = re.compile(rb'[{,]role="([^"\\]*)"')
MOST_WAITING = 1e9
"""Larger values are ignored."""


class Figures(NamedTuple):
    """A replica's report: sums over its models, and the fullest arena."""

    waiting: float
    arena: float
    models: frozenset[str]
    role: str = ""
    running: float = 0.0


def read_figures(text: bytes) -> Figures:
    """Parse the metrics that routing needs."""
    waiting, running, arena, models, role = 0.0, 0.0, 0.0, set(), ""
    for name, labels, value in LINE.findall(text):
        if found := NAME.search(labels):
            models.add(found[1].decode(errors="replace"))
        if name == b"vllm:num_requests_waiting":
            waiting += _number(value)
        elif name == b"vllm:num_requests_running":
            running += _number(value)
        elif name == b"vllm:kv_cache_usage_perc":
            arena = max(arena, min(_number(value), 1.0))
        elif name == b"specdec:reach_role" and (found := ROLE.search(b"{" + labels)):
            role = found[1].decode(errors="replace")
    return Figures(waiting, arena, frozenset(models), role, running)


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < MOST_WAITING else 0.0
