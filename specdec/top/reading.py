"""What a server says of itself at one time, and what has come about between two times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

COUNTS = ("steps", "tokens", "drafted", "accepted", "preemptions", "failed_steps", "moved_blocks")
PREFIX_COUNTS = ("asked", "hit", "fetched", "states_kept", "states_evicted", "blocks_evicted")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What is kept for requests that begin alike, beside what is counted of it."""

    blocks: int
    alpha: float | None
    """Of the policy by which they give way; None: the server does not say."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of `/server_info`; one that lacks a field is a LookupError, a TypeError or a ValueError."""

    at_s: float
    version: str
    model: str
    runs: str
    """On what, and in which numbers."""
    drafters: tuple[str, ...]
    running: int
    waiting: int
    max_running: int
    acceptance_length: float
    per_depth: tuple[float, ...]
    arena: Mapping[str, int]
    """Bytes by class; they add up to all of it."""
    prefixes: Prefixes | None
    counts: Mapping[str, int]
    """What only grows while a server lives."""
    limited_by: Mapping[str, int]
    """The same, of steps in which something was short, by what it was."""

    @classmethod
    def of(cls, info: Mapping[str, Any], at_s: float) -> Self:
        kept, blocks = info["prefixes"], _cached_blocks(info)
        counts = {name: int(info[name]) for name in COUNTS}
        if kept:
            counts |= {name: int(kept[name]) for name in PREFIX_COUNTS}
        alpha = kept.get("alpha") if kept else None
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
            arena=_arena(info, blocks),
            prefixes=Prefixes(blocks, None if alpha is None else float(alpha)) if kept else None,
            counts=counts,
            limited_by={str(name): int(count) for name, count in info["limited_by"].items()},
        )


@dataclass(frozen=True, slots=True)
class Growth:
    """What was counted between two readings, and in which time."""

    seconds: float
    counts: Mapping[str, int]
    limited_by: Mapping[str, int]

    @classmethod
    def between(cls, before: Reading, now: Reading) -> Self:
        """Count what has come; a server that has begun anew in between has counted from nothing."""
        old, old_limits = before.counts, before.limited_by
        if _fell(old, now.counts) or _fell(old_limits, now.limited_by):
            old, old_limits = {}, {}
        return cls(now.at_s - before.at_s, _more(old, now.counts), _more(old_limits, now.limited_by))


def shares(parts: Sequence[int], width: int) -> list[int]:
    """Split a bar's width by its parts, none of them off by a whole cell; all of it goes to somebody."""
    total, reached, edges = sum(parts), 0, [0]
    for part in parts:
        reached += part
        edges.append(round(width * reached / total) if total else 0)
    edges[-1] = width
    return [after - before for before, after in pairwise(edges)]


def _cached_states(info: Mapping[str, Any]) -> int:
    """Return the bytes of states that are kept for later; the server counts them, and bytes of both kinds."""
    kept = info["prefixes"]
    if not kept:
        return 0
    left = max(int(kept["states_kept"]) - int(kept["states_evicted"]), 0)
    # A failure takes all back and counts nothing as given up.
    return min(left * int(info["layout"]["state_bytes"]), _cached(info), int(info["arena"]["state_bytes"]))


def _cached(info: Mapping[str, Any]) -> int:
    return int(info["prefixes"]["cached_bytes"]) if info["prefixes"] else 0


def _cached_blocks(info: Mapping[str, Any]) -> int:
    left, size = _cached(info) - _cached_states(info), int(info["layout"]["block_bytes"])
    return min(left, int(info["arena"]["block_bytes"])) // size if size else 0


def _arena(info: Mapping[str, Any], cached_blocks: int) -> dict[str, int]:
    usage = {name: int(count) for name, count in info["arena"].items()}
    blocks, states = cached_blocks * int(info["layout"]["block_bytes"]), _cached_states(info)
    held = usage["block_bytes"] + usage["state_bytes"] + usage["record_bytes"]
    return {
        "KV blocks": usage["block_bytes"] - blocks,
        "states": usage["state_bytes"] - states,
        "drafts": usage["record_bytes"],
        "prefixes": blocks + states,
        # The server steps while it counts: what was taken meanwhile may count twice.
        "holes": max(usage["capacity_bytes"] - held - usage["free_bytes"], 0),
        "free": usage["free_bytes"],
    }


def _fell(before: Mapping[str, int], now: Mapping[str, int]) -> bool:
    return any(now.get(name, 0) < count for name, count in before.items())


def _more(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}
