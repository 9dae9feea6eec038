"""Choose a replica by expected time to first byte, then by memory use, within a load bound.

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
L = TypeVar("L", bound=Load)


class Choice(NamedTuple, Generic[L]):
    """The chosen replica and its expected time to first byte."""

    replica: L
    line: Line
    expected_s: float


def choose(replicas: Sequence[L], prompt: Prompt, load_factor: float) -> Choice[L] | None:
    """Choose one of these replicas, or None if there are none.

    No replica gets more than `load_factor` times the mean of requests in flight.
    """
    if not replicas:
        return None
    most = math.ceil(load_factor * (sum(own.in_flight for own in replicas) + 1) / len(replicas))
    found = [
        Choice(own, line, expected_s(own, line, prompt))
        for own, line in zip(replicas, fit_lines(replicas), strict=True)
        if own.in_flight < most
    ]
    near_s = CLOSE * min(own.expected_s for own in found) + CLOSE_S
    near = [own for own in found if own.expected_s <= near_s]
    return min(near, key=lambda own: _rank(own.replica, prompt))


def expected_s(replica: Load, line: Line, prompt: Prompt) -> float:
    """Estimate the time to first byte from pending prefill, uncached bytes of the prompt, and the queue."""
    unread = prompt.size - replica.known.hit(prompt)
    queued = max(replica.waiting - replica.in_flight, 0.0) * line.fixed_s  # those of other routers
    return line.at(replica.reading + unread) + queued


def _rank(replica: Load, prompt: Prompt) -> tuple[int, int, int, bytes]:
    """Order replicas that are equally fast; the last part sends equal prompts to one, in every router."""
    place = hashlib.blake2b(replica.name.encode(), key=prompt.key, digest_size=8).digest()
    return int(replica.arena / SHARE), -replica.known.hit(prompt), replica.in_flight, place
