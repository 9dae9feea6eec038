"""Cache hits of replicas with real prefix caches, by the choice alone: virtual time, no model and no Ray."""

import heapq
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from specdec.ray import choose as choosing
from specdec.ray.choose import choose
from specdec.ray.load import Flight, Load, fit_lines
from specdec.ray.prompts import Prompt, look_at
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.tree import Ids
from tests.ray.measure import prompts
from tools.bench.prefix.generate import generate

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)
STREAMS, STEP_S, TOKEN_S, DECODE_S = 4, 0.01, 1e-4, 0.1
FRESH = np.arange(8, dtype=np.int32)
"""An answer."""
Asked = tuple[Prompt, Ids]


class Replica:
    """Prefills one request at a time, and decodes any number next to it."""

    def __init__(self, name: str, num_bytes: int, clock: "Clock") -> None:
        self.load, self.clock = Load(name, lambda: clock.now_s), clock
        self.cache = CacheReplay(LAYOUT, num_bytes, float)
        self.is_free_at_s = 0.0
        self.hit = 0

    def serve(self, prompt: Prompt, ids: Ids) -> Iterator[float]:
        """Yield the time until which the request waits; its flight ends with it."""
        flight = Flight(self.load, prompt, fit_lines([self.load])[0])
        while self.is_free_at_s > self.clock.now_s:
            yield self.is_free_at_s
        live = self.cache.admit(ids, len(FRESH))
        assert live
        self.hit += live.hit
        self.is_free_at_s = self.clock.now_s + STEP_S + TOKEN_S * (len(ids) - live.hit)
        yield self.is_free_at_s
        self.cache.read(live, ids)
        flight.begun()
        yield self.clock.now_s + DECODE_S
        self.cache.end(live, np.concatenate([ids, FRESH]))
        flight.end()


class Clock:
    """Runs streams, which each ask the next question when one is answered, in virtual time."""

    now_s = 0.0

    def run(self, streams: Sequence[Iterator[float]]) -> None:
        due = [(0.001 * i, i, stream) for i, stream in enumerate(streams)]
        while due:
            self.now_s, i, stream = heapq.heappop(due)
            if (until_s := next(stream, None)) is not None:
                heapq.heappush(due, (until_s, i, stream))


def hit_rate(asked: Sequence[Asked], count: int, slabs: int) -> float:
    """Return the cached share of all prompts' tokens with replicas that share the memory."""
    clock = Clock()
    replicas = [Replica(f"r{i}", slabs // count * LAYOUT.slab_bytes, clock) for i in range(count)]
    todo = iter(asked)

    def stream() -> Iterator[float]:
        for prompt, ids in todo:
            choice = choose([replica.load for replica in replicas], prompt, 1.25)
            assert choice
            yield from next(replica for replica in replicas if replica.load is choice.replica).serve(
                prompt, ids
            )

    clock.run([stream() for _ in range(STREAMS)])
    return sum(replica.hit for replica in replicas) / sum(len(ids) for _, ids in asked)


def tenants() -> list[Asked]:
    """Return the requests of `tests.ray.measure`, a byte for a token."""
    texts = [json.dumps({"prompt": text, "stream": True}).encode() for text in prompts(200)]
    return [(look_at(own, {}), np.frombuffer(own, np.uint8).astype(np.int32)) for own in texts]


def trace(name: str, sessions: int) -> list[Asked]:
    turns = generate(name, 0, sessions=sessions, vocab=1000, scale=0.2, most=4000).turns[:200]
    bodies = [json.dumps({"prompt": turn.prompt.tolist(), "stream": True}).encode() for turn in turns]
    return [(look_at(body, {}), turn.prompt) for body, turn in zip(bodies, turns, strict=True)]


SLABS = 4000


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("workload", ["tenants", "agents", "system-prompts", "lmsys"])
def test_replicas_hit_nearly_as_often_as_one_with_all_memory(workload: str, count: int) -> None:
    asked = (
        tenants() if workload == "tenants" else trace(workload, 200 if workload == "system-prompts" else 20)
    )
    assert hit_rate(asked, count, SLABS) >= 0.95 * hit_rate(asked, 1, SLABS) > 0.5


def test_a_load_bound_for_few_requests_too_would_hit_less(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tenants()
    monkeypatch.setattr(choosing, "FEW", 0)
    assert hit_rate(asked, 2, SLABS) < 0.95 * hit_rate(asked, 1, SLABS)
