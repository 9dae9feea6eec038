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


class Scale:
    """Autoscaling policy of Ray Serve: adds replicas at once, and removes one per `scale_down_delay`."""

    def __init__(self, scale_down_delay: float) -> None:
        self._delay_s = scale_down_delay

    def __call__(self, context: Any) -> tuple[int, dict[str, float]]:
        """Return the number of replicas and the policy's state."""
        shares: Mapping[Any, float] = (context.aggregated_metrics or {}).get("wanted_share", {})
        needed = max(math.ceil(sum(shares.values()) / TARGET), 1)
        now_s, current = context.current_time, context.target_num_replicas
        since_s = (context.policy_state or {}).get("calm_since_s")
        if needed >= current:
            return _within(context, needed), {}
        since_s = now_s if since_s is None else since_s
        if now_s - since_s < self._delay_s:
            return _within(context, current), {"calm_since_s": since_s}
        return _within(context, current - 1), {"calm_since_s": now_s}


def _within(context: Any, count: int) -> int:
    most = max(context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas)
    return int(min(max(count, context.capacity_adjusted_min_replicas), most))
