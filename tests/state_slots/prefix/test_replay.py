"""A replay hits the states that the rule specifies: after prompts, after requests, and at divergences."""

import random

import numpy as np
import pytest
import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.cache import PrefixCache
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.tree import Ids

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)
AMPLE = 4000 * LAYOUT.slab_bytes


def ids(values: list[int]) -> Ids:
    return np.asarray(values, np.int32)


def requests(seed: int, count: int) -> list[tuple[list[int], list[int]]]:
    """Make prompts that extend others, or diverge from them anywhere."""
    draw = random.Random(seed)
    known: list[list[int]] = [[draw.randrange(4) for _ in range(40)]]
    made = []
    for _ in range(count):
        stem = draw.choice(known)
        prompt = [
            *stem[: draw.randrange(1, len(stem) + 1)],
            *(draw.randrange(4) for _ in range(draw.randrange(1, 30))),
        ]
        output = [draw.randrange(4) for _ in range(draw.randrange(1, 20))]
        known.append([*prompt, *output])
        made.append((prompt, output))
    return made


class Rule:
    """A reference that keeps every state of the rule forever, in a list."""

    def __init__(self) -> None:
        self.known: list[list[int]] = []
        self.states: set[tuple[int, ...]] = set()

    def serve(self, prompt: list[int], output: list[int]) -> int:
        asked = prompt[:-1]
        hit = max((len(s) for s in self.states if list(s) == asked[: len(s)]), default=0)
        parting = max((common(asked, one) for one in self.known), default=0)
        if parting > hit:
            self.states.add(tuple(asked[:parting]))
        self.states.add(tuple(prompt))
        whole = [*prompt, *output][:-1]
        self.known += [whole]
        self.states.add(tuple(whole))
        return hit


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("has_head", [False, True])
def test_with_memory_for_all_hits_follow_the_rule(has_head: bool) -> None:
    replay, rule = CacheReplay(LAYOUT, AMPLE, float, has_head=has_head), Rule()
    for prompt, output in requests(1, 150):
        assert replay.serve(ids(prompt), ids([*prompt, *output])) == rule.serve(prompt, output)
    replay.cache.check()


def test_missing_states_at_divergence_points_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: only ends have states."""
    monkeypatch.setattr(PrefixCache, "keep_copy", lambda *_: None)
    replay, rule = CacheReplay(LAYOUT, AMPLE, float), Rule()
    pairs = [
        (replay.serve(ids(prompt), ids([*prompt, *output])), rule.serve(prompt, output))
        for prompt, output in requests(1, 150)
    ]
    assert any(own != right for own, right in pairs)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_with_little_memory_its_books_stay_right(alpha: float) -> None:
    replay = CacheReplay(
        LAYOUT, 12 * LAYOUT.slab_bytes, lambda tokens: tokens * (100.0 + tokens), alpha=alpha
    )
    living = []
    for prompt, output in requests(2, 300):
        whole = ids([*prompt, *output])
        while (live := replay.admit(ids(prompt), len(output))) is None:
            assert living, "one request always fits"
            replay.end(*living.pop(0))
        replay.read(live, ids(prompt))
        living.append((live, whole))
        if len(living) == 3:
            replay.end(*living.pop(0))
    while living:
        replay.end(*living.pop())
    assert replay.cache.counts.states_evicted
    replay.cache.check()


@pytest.mark.parametrize("seed", range(3))
def test_the_least_recently_used_is_evicted_first(seed: int) -> None:
    """One order serves several evictions, and some of its entries are used before their turn."""
    draw, replay = random.Random(seed), CacheReplay(LAYOUT, AMPLE, float)
    texts = {first: ids([first, 1, 2, 3, 4]) for first in range(60)}
    used = list(texts)

    def kept() -> set[int]:
        return {int(node.edge[0]) for node in replay.cache.tree.nodes()}

    for text in texts.values():
        replay.serve(text[:3], text)
    while used:
        for first in draw.sample(used, min(draw.randrange(3), len(used))):
            replay.cache._touch(replay.cache.tree.walk(SOLE, texts[first])[0])
            used.append(used.pop(used.index(first)))
        most = len(used) - 1
        assert replay.cache.make_room(lambda most=most: len(kept()) <= most)  # type: ignore[misc]
        assert kept() == set(used[1:])
        del used[0]


def test_a_request_that_cannot_fit_with_its_hit_evicts_nothing() -> None:
    replay = CacheReplay(LAYOUT, 40 * LAYOUT.slab_bytes, float)
    cache, arena = replay.cache, replay.arena
    long = ids([1] * 16 * 10 * LAYOUT.blocks_per_slab)
    replay.serve(long[:-1], long)
    for first in range(2, 8):
        replay.serve(ids([first, 1]), ids([first, 1, 2]))
    before = len(list(cache.tree.nodes()))
    lease = cache.lease(ids([*long, 2]))
    assert lease.shared == 10 * LAYOUT.blocks_per_slab - 1
    assert not arena.can_take(blocks=29 * LAYOUT.blocks_per_slab, states=1)
    assert len(list(cache.tree.nodes())) == before
    cache.leave(lease)
    assert arena.can_take(blocks=29 * LAYOUT.blocks_per_slab, states=1)


def test_tenants_share_nothing() -> None:
    replay = CacheReplay(LAYOUT, AMPLE, float)
    whole = ids(list(range(40)))
    first, salted, other = Tenant("a"), Tenant("a", "a"), Tenant("b", "a")
    hits = [replay.serve(whole[:35], whole, own) for own in (first, first, first, salted, other, SOLE)]
    assert hits == [0, 0, 34, 0, 0, 0]
