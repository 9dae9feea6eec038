"""Choose a replica: the least expected time to the first byte, then the least-used memory, within a bound.

Everything is counted in bytes of prompts, which the router sees, and in seconds, which it measures.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from specdec.route.prompts import Prompt
from specdec.route.rates import Line
from specdec.route.replicas import Fleet, Replica

CLOSE = 1.05
CLOSE_S = 0.001
"""Times within this factor and this many seconds of each other count as equal."""
SHARE = 0.1
"""Parts of an arena in use that differ by less than this count as equal."""


class Choice(NamedTuple):
    """The replica that is asked, and how long it takes to read."""

    replica: Replica
    line: Line
    expected_s: float


def choose(fleet: Fleet, replicas: Sequence[Replica], prompt: Prompt, load_factor: float) -> Choice | None:
    """Choose one of these replicas, or none if there are none."""
    if not replicas:
        return None
    lines = fleet.lines(replicas)
    most = math.ceil(load_factor * (sum(own.in_flight for own in replicas) + 1) / len(replicas))
    found = [
        Choice(own, line, expected_s(own, line, prompt))
        for own, line in zip(replicas, lines, strict=True)
        if own.in_flight < most
    ]
    near_s = CLOSE * min(own.expected_s for own in found) + CLOSE_S
    near = [own for own in found if own.expected_s <= near_s]
    return min(near, key=lambda own: _rank(own.replica, prompt))


def expected_s(replica: Replica, line: Line, prompt: Prompt) -> float:
    """Estimate the seconds to the first byte: what waits, then what of this prompt is not known there."""
    unread = prompt.size - replica.known.hit(prompt)
    queued = max(replica.waiting - replica.in_flight, 0.0) * line.fixed_s  # those of other routers
    return line.at(replica.reading + unread) + queued


def _rank(replica: Replica, prompt: Prompt) -> tuple[int, int, int, bytes]:
    """Order replicas that are equally fast; by the last part equal prompts go to one, in every router."""
    place = hashlib.blake2b(replica.url.encode(), key=prompt.key, digest_size=8).digest()
    return int(replica.arena / SHARE), -replica.known.hit(prompt), replica.in_flight, place
