"""A prompt's state is kept on a guess, so that the second prompt that shares it hits."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.cache import GUESS_TOKENS, PrefixCache
from specdec.state_slots.prefix.replay import Replay
from specdec.state_slots.prefix.tree import Ids

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)


def prompt(seed: int, count: int, ending: Iterable[int] = ()) -> Ids:
    drawn = np.random.default_rng(seed).integers(0, 1000, count)
    return np.asarray([*drawn, *ending], np.int32)


def serve(replay: Replay, asked: Ids, tenant: Tenant = SOLE) -> int:
    return replay.serve(asked, np.asarray([*asked, 1, 2, 3], np.int32), tenant)


def test_an_identical_prompt_hits_the_second_time() -> None:
    replay = Replay(LAYOUT, 400 * LAYOUT.slab_bytes, float)
    asked = prompt(1, 5 * GUESS_TOKENS + 1)
    assert [serve(replay, asked) for _ in range(3)] == [0, 5 * GUESS_TOKENS, 5 * GUESS_TOKENS]
    replay.cache.check()


def test_the_second_of_five_prompts_with_one_prefix_hits() -> None:
    replay = Replay(LAYOUT, 400 * LAYOUT.slab_bytes, float)
    found = [serve(replay, prompt(1, 1351, [2000 + i] * (9 + i))) for i in range(5)]
    assert found == [0, 1280, 1351, 1351, 1351]
    replay.cache.check()


def test_tenants_share_no_guess() -> None:
    replay = Replay(LAYOUT, 400 * LAYOUT.slab_bytes, float)
    asked = prompt(1, 600)
    assert [serve(replay, asked, Tenant(name, "")) for name in ("one", "other", "one")] == [0, 0, 512]


def lost(slabs: int) -> int:
    """Fill a cache with states that requests have left, read one more prompt; count states lost to it."""
    replay = Replay(LAYOUT, slabs * LAYOUT.slab_bytes, float)
    for number in range(slabs):
        serve(replay, prompt(number, 40))
    asked = prompt(1000, 300)
    live = replay.admit(asked, 3)
    assert live and live.lease.guess == GUESS_TOKENS
    before = [node for node in replay.cache.tree.nodes() if node.state is not None]
    replay.read(live, asked)
    return sum(node.state is None or not replay.cache.tree.holds(node) for node in before)


SIZES = range(40, 60)


def test_a_guess_evicts_no_other_state() -> None:
    assert not any(lost(slabs) for slabs in SIZES)


def test_a_guess_that_evicts_like_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "keep_guess", PrefixCache.keep_copy)
    assert any(lost(slabs) for slabs in SIZES)


def test_guesses_are_evicted_first() -> None:
    replay = Replay(LAYOUT, 400 * LAYOUT.slab_bytes, float)
    serve(replay, prompt(1, 40))
    serve(replay, prompt(2, 300))
    order = replay.score.order([node for node in replay.cache.tree.nodes() if node.state is not None])
    assert [node.end for node in order] == [GUESS_TOKENS, 42, 302]
