"""Choose a replica by expected time to first byte and prefill work, then by memory use, within a load bound.

The units are bytes of prompts, which a router sees, and seconds, which it measures.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from specdec.ray.load import Load, fit_lines
from specdec.ray.prompts import Prompt
from specdec.ray.rates import Line

CLOSE = 1.05
CLOSE_S = 0.001
"""Times within this factor and this many seconds of each other count as equal."""
SHARE = 0.1
"""Arena shares that differ by less than this count as equal."""
FEW = 8
"""Requests in flight that a replica may have whatever the mean is if it has a prefix of the prompt. With four
streams 1.25 x a mean of 2 is 3, which made one request in eight leave its prefix: 92 % of one engine's hits
instead of 98 %, as with 4 or 16 (`tests/ray/test_hits.py`)."""
WORK = 1.0
"""Weight of the time for which a request's prefill delays others. Without it a prefix is copied to any idle
replica while its own is busy: 97 % of one engine's hits instead of 98 %, and less with noisy times."""
L = TypeVar("L", bound=Load)


class Choice(NamedTuple, Generic[L]):
    """The chosen replica and its cost."""

    replica: L
    line: Line
    cost_s: float


def choose(replicas: Sequence[L], prompt: Prompt, load_factor: float) -> Choice[L] | None:
    """Choose one of these replicas, or None if there are none.

    No replica gets more than `load_factor` times the mean of requests in flight, or `FEW` if that is more and
    it has a prefix of the prompt.
    """
    if not replicas:
        return None
    mean = (sum(own.in_flight for own in replicas) + 1) / len(replicas)
    most = math.ceil(load_factor * mean)
    found = [
        Choice(own, line, cost_s(own, line, prompt))
        for own, line in zip(replicas, fit_lines(replicas), strict=True)
        if own.in_flight < most or (own.in_flight < FEW and own.known.hit(prompt))
    ]
    near_s = CLOSE * min(own.cost_s for own in found) + CLOSE_S
    near = [own for own in found if own.cost_s <= near_s]
    return min(near, key=lambda own: _rank(own.replica, prompt))


def cost_s(replica: Load, line: Line, prompt: Prompt) -> float:
    """Estimate the time to first byte, and add `WORK` times the prefill of uncached bytes.

    The time to first byte comes from pending prefill, uncached bytes of the prompt, and the queue.
    """
    unread = prompt.size - replica.known.hit(prompt)
    queued = max(replica.waiting - replica.in_flight, 0.0) * line.fixed_s  # those of other routers
    return line.at(replica.reading + (1 + WORK) * unread) + queued


def _rank(replica: Load, prompt: Prompt) -> tuple[int, int, int, bytes]:
    """Order replicas that are equally fast; the last part sends equal prompts to one, in every router."""
    place = hashlib.blake2b(replica.name.encode(), key=prompt.key, digest_size=8).digest()
    return int(replica.arena / SHARE), -replica.known.hit(prompt), replica.in_flight, place
