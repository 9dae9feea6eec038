"""Read what a replica reports about itself in /metrics."""

import re
from typing import NamedTuple

LINE = re.compile(
    rb"^vllm:(num_requests_waiting|num_requests_running|kv_cache_usage_perc)(?:\{[^}\n]*\})? ([0-9.eE+\-]+)",
    re.MULTILINE,
)
MOST_WAITING = 1e9
"""Larger values are ignored."""


class Figures(NamedTuple):
    """A replica's report: sums over its models, and the fullest arena."""

    waiting: float = 0.0
    running: float = 0.0
    arena: float = 0.0


def read_figures(text: bytes) -> Figures:
    """Parse the metrics that routing needs."""
    waiting, running, arena = 0.0, 0.0, 0.0
    for name, value in LINE.findall(text):
        if name == b"num_requests_waiting":
            waiting += _number(value)
        elif name == b"num_requests_running":
            running += _number(value)
        else:
            arena = max(arena, min(_number(value), 1.0))
    return Figures(waiting, running, arena)


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < MOST_WAITING else 0.0
