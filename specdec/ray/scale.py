"""Autoscaling policy: enough replicas for the memory that requests want, and for those that wait."""

import math
from collections.abc import Mapping
from typing import Any

TARGET = 0.8
"""Arena share to aim for: running requests grow, and evicting all cached prefixes costs hits."""


def wanted_share(arena: float, running: float, waiting: float) -> float:
    """Estimate how many replicas' memory the requests of one want.

    A replica is full if requests wait, whatever they wait for: memory, a slot, or prefill. Waiting ones are
    taken to be as large as running ones.
    """
    if not waiting:
        return arena
    return (running + waiting) / running if running else waiting


def scale(context: Any) -> tuple[int, dict[str, float]]:
    """Return the number of replicas for Ray Serve's autoscaler, which applies delays and limits."""
    shares: Mapping[Any, float] = (context.aggregated_metrics or {}).get("wanted_share", {})
    needed = max(math.ceil(sum(shares.values()) / TARGET), 1)
    return max(needed, context.target_num_replicas - 1), {}  # fewer one by one
