"""Eviction takes from the caller with the most cached memory; a caller can flush only its own."""

import random

import pytest

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.score import Score
from tests.state_slots.prefix.test_replay import AMPLE, LAYOUT, ids

ALICE, BOB = Tenant("alice"), Tenant("bob")


def flood(alpha: float) -> tuple[int, CacheReplay]:
    """Serve a few of alice's prompts and a hundred times as many of bob's, then hers again; count hits."""
    replay = CacheReplay(LAYOUT, 120 * LAYOUT.slab_bytes, lambda tokens: float(tokens**2), alpha=alpha)
    draw = random.Random(1)
    hers = [[draw.randrange(1000) for _ in range(120)] for _ in range(8)]
    for text in hers:
        replay.serve(ids(text[:100]), ids(text), ALICE)
    for number in range(800):
        text = [draw.randrange(1000) for _ in range(120)]
        replay.serve(ids(text[:100]), ids(text), Tenant("bob", str(number % 50)))
    replay.cache.check()
    hits = sum(replay.serve(ids([*text, 1]), ids([*text, 1, 2]), ALICE) > 0 for text in hers)
    assert replay.cache.counts.states_evicted > 500
    return hits, replay


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_flood_leaves_other_callers_their_share(alpha: float) -> None:
    assert flood(alpha)[0] == 8


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_giving_up_by_recency_alone_is_noticed(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the last caller keeps all."""
    monkeypatch.setattr(Score, "of_largest", lambda score, nodes, kept: nodes)
    assert flood(alpha)[0] < 8


def test_of_equal_parts_the_one_unused_for_longest_is_evicted_from() -> None:
    """The order of the callers' hashes must not decide."""
    replay = CacheReplay(LAYOUT, AMPLE, float)
    names = [f"caller {number}" for number in range(8)]
    for start in range(8):
        replay.cache.flush()
        turn = names[start:] + names[:start]
        for name in turn:
            replay.serve(ids(range(90)), ids(range(100)), Tenant(name))
        kept = list(replay.cache.tree.nodes())
        chosen = replay.cache.score.of_largest(kept[::-1], kept)
        assert {node.tenant.caller for node in chosen} == {turn[0]}


def test_a_later_caller_gets_its_share() -> None:
    """It takes over memory that others have filled."""
    _, replay = flood(0.0)
    draw = random.Random(2)
    texts = [[draw.randrange(1000) for _ in range(120)] for _ in range(8)]
    for text in texts:
        replay.serve(ids(text[:100]), ids(text), Tenant("carol"))
    carol = Tenant("carol")
    assert all(replay.serve(ids([*text, 1]), ids([*text, 1, 2]), carol) == 119 for text in texts)


@pytest.mark.parametrize("caller", [None, "alice", "bob", ""])
def test_flushing_forgets_all_or_one_callers(caller: str | None) -> None:
    replay = CacheReplay(LAYOUT, AMPLE, float)
    tenants = (ALICE, Tenant("alice", "salt"), BOB, SOLE)
    text = list(range(100))
    for tenant in tenants:
        for end in (90, 60, 100):
            replay.serve(ids(text[: end - 10]), ids(text[:end]), tenant)
    replay.cache.flush(caller)
    replay.cache.check()
    for tenant in tenants:
        forgot = caller is None or tenant.caller == caller
        assert (replay.serve(ids([*text, 1]), ids([*text, 1, 2]), tenant) == 0) == forgot
    if caller is None:
        replay.cache.flush()
        assert not list(replay.cache.tree.nodes()) and not replay.cache.tree.roots
