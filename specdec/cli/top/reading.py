"""A reading of `/server_info`, and the growth between two readings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

COUNTS = ("steps", "tokens", "drafted", "accepted", "preemptions", "failed_steps", "moved_blocks")
PREFIX_COUNTS = ("asked", "hit", "fetched", "states_evicted", "blocks_evicted")


@dataclass(frozen=True, slots=True)
class PrefixCacheUsage:
    """The prefix cache's current size."""

    states: int
    blocks: int
    alpha: float | None
    """The eviction policy's weight; None if the server does not report it."""


@dataclass(frozen=True, slots=True)
class ServerReading:
    """One `/server_info` response; a missing or invalid field raises LookupError, TypeError or ValueError."""

    at_s: float
    version: str
    model: str
    runs: str
    """Device, dtype and draft slots."""
    drafters: tuple[str, ...]
    running: int
    waiting: int
    max_running: int
    acceptance_length: float
    per_depth: tuple[float, ...]
    arena: Mapping[str, int]
    """Bytes by class; they add up to the arena's size."""
    prefixes: PrefixCacheUsage | None
    counts: Mapping[str, int]
    """Counters."""
    limited_by: Mapping[str, int]
    """Steps that a resource limited, by resource."""
    drafting: str | None = None
    """Which drafts run now and why; None before the first decision."""
    others: int = 0
    """Number of the server's other models."""

    @property
    def shown(self) -> str:
        """Return the model's name, and the number of other models."""
        return f"{self.model} (and {self.others} more: --model)" if self.others else self.model

    @classmethod
    def of(cls, info: Mapping[str, Any], at_s: float) -> Self:
        prefixes = info["prefixes"]
        states, blocks = (
            int(info["arena"][f"cached_{kind}_bytes"]) // (int(info["layout"][f"{kind}_bytes"]) or 1)
            for kind in ("state", "block")
        )
        counts = {name: int(info[name]) for name in COUNTS}
        if prefixes:
            counts |= {name: int(prefixes[name]) for name in PREFIX_COUNTS}
        alpha = prefixes.get("alpha") if prefixes else None
        return cls(
            at_s=at_s,
            version=str(info["version"]),
            model=str(info["model"]),
            runs=f"{info['device']} in {info['dtype']}, {info['slots']} slots",
            drafters=tuple(map(str, info["drafters"])),
            running=int(info["running"]),
            waiting=int(info["waiting"]),
            max_running=int(info["max_running"]),
            acceptance_length=float(info["acceptance_length"]),
            per_depth=tuple(map(float, info["acceptance_by_depth"])),
            arena=_arena(info["arena"]),
            prefixes=PrefixCacheUsage(states, blocks, None if alpha is None else float(alpha))
            if prefixes
            else None,
            counts=counts,
            limited_by={str(name): int(count) for name, count in info["limited_by"].items()},
            drafting=str(info["speculation"]["reason"]) if info.get("speculation") else None,
            others=max(len(info.get("models", ())) - 1, 0),
        )


@dataclass(frozen=True, slots=True)
class CounterGrowth:
    """The growth of counters between two readings."""

    seconds: float
    counts: Mapping[str, int]
    limited_by: Mapping[str, int]

    @classmethod
    def between(cls, previous: ServerReading, current: ServerReading) -> Self:
        """Return the growth; after a restart, counters are taken to have started at zero."""
        old, old_limits = previous.counts, previous.limited_by
        if _fell(old, current.counts) or _fell(old_limits, current.limited_by):
            old, old_limits = {}, {}
        return cls(
            current.at_s - previous.at_s, _more(old, current.counts), _more(old_limits, current.limited_by)
        )


def shares(parts: Sequence[int], width: int) -> list[int]:
    """Split a bar's width by its parts, each within one cell of its share; together they fill the bar."""
    total, reached, edges = sum(parts), 0, [0]
    for part in parts:
        reached += part
        edges.append(round(width * reached / total) if total else 0)
    edges[-1] = width
    return [after - before for before, after in pairwise(edges)]


def _arena(usage: Mapping[str, Any]) -> dict[str, int]:
    parts = {
        "KV blocks": int(usage["block_bytes"]),
        "states": int(usage["state_bytes"]),
        "drafts": int(usage["record_bytes"]),
        "prefixes": int(usage["cached_block_bytes"]) + int(usage["cached_state_bytes"]),
    }
    free = int(usage["free_bytes"])
    # The server keeps stepping while it counts: blocks allocated meanwhile may count twice.
    holes = max(int(usage["capacity_bytes"]) - sum(parts.values()) - free, 0)
    return {**parts, "holes": holes, "free": free}


def _fell(previous: Mapping[str, int], current: Mapping[str, int]) -> bool:
    return any(current.get(name, 0) < count for name, count in previous.items())


def _more(previous: Mapping[str, int], current: Mapping[str, int]) -> dict[str, int]:
    return {name: count - previous.get(name, 0) for name, count in current.items()}
