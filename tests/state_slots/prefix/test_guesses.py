"""The state at the end of each chunk is cached as a guess, so that the second prompt with a prefix hits."""

import numpy as np
import pytest
import torch

from specdec.config.tenant import SOLE, Tenant
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.cache import APART, PrefixCache
from specdec.state_slots.prefix.lease import PrefixLease
from specdec.state_slots.prefix.replay import CacheReplay
from specdec.state_slots.prefix.tree import Ids, PrefixNode

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)
SLABS = 60


def prompt(seed: int, count: int, ending: tuple[int, ...] = ()) -> Ids:
    drawn = np.random.default_rng(seed).integers(0, 1000, count)
    return np.asarray([*drawn, *ending], np.int32)


def serve(replay: CacheReplay, asked: Ids, tenant: Tenant = SOLE) -> int:
    hit = replay.serve(asked, np.asarray([*asked, 1, 2, 3], np.int32), tenant)
    replay.cache.check()
    return hit


def replay_of(slabs: int) -> CacheReplay:
    return CacheReplay(LAYOUT, slabs * LAYOUT.slab_bytes, float)


@pytest.mark.parametrize("ending", [9, 300])
def test_the_second_of_five_prompts_with_one_prefix_hits(ending: int) -> None:
    replay = replay_of(400)
    found = [serve(replay, prompt(1, 1351, (2000 + i,) * ending)) for i in range(5)]
    assert found == [0, 1024, 1351, 1351, 1351]


@pytest.mark.parametrize("length", [129, 200, 512, 513, 1300])
def test_an_identical_prompt_hits_the_second_time(length: int) -> None:
    replay, asked = replay_of(400), prompt(1, length)
    assert [serve(replay, asked) for _ in range(3)] == [0, length - 1, length - 1]


def test_a_short_prompt_is_not_worth_a_forward_pass() -> None:
    replay, asked = replay_of(400), prompt(1, APART)
    assert [serve(replay, asked) for _ in range(3)] == [0, 0, APART - 1]


@pytest.mark.parametrize(
    ("length", "turns", "guesses"),
    [
        (1000, (), (999,)),
        (1000, (300, 990), (300, 990)),  # a generation prompt of 10 tokens is prefilled again
        (1000, (300, 800), (300, 999)),
        (1000, (950, 950), (950,)),
        (400, (300, 350), (300,)),
        (500, (300, 400), (300, 499)),
        (1000, (30, 990), (990,)),
        (1000, (300, 1000), (300, 999)),
        (1000, (1000, 1000), (999,)),
    ],
)
def test_divergence_is_guessed_after_a_chats_first_and_last_turn(
    length: int, turns: tuple[int, ...], guesses: tuple[int, ...]
) -> None:
    cache, asked = replay_of(400).cache, prompt(1, length)
    assert cache.lease(asked, SOLE, (), turns).guesses == guesses


def test_cached_lengths_are_not_guessed_again() -> None:
    replay, asked = replay_of(400), prompt(1, 1000)
    assert [serve(replay, asked[:301]), serve(replay, asked[:302])] == [0, 300]
    assert replay.cache.lease(asked, SOLE, (), (400, 990)).guesses == (990,)


def test_no_prompt_is_cut_for_a_guess_that_has_no_memory() -> None:
    replay, asked = replay_of(SLABS), prompt(1, 200)
    assert replay.cache.lease(asked).guesses == (199,)
    while replay.cache.arena.has_free_state:
        replay.cache.arena.take_state("other")
    assert replay.cache.lease(asked).guesses == ()


def test_tenants_share_no_guess() -> None:
    replay, asked = replay_of(400), prompt(1, 600)
    assert [serve(replay, asked, Tenant(name)) for name in ("one", "other", "one")] == [0, 0, 599]


def guesses_of(replay: CacheReplay) -> list[PrefixNode]:
    guesses = replay.cache.guesses
    return [node for node in replay.cache.tree.nodes() if node in guesses._of.get(node.tenant.caller, {})]


def used_prefixes_that_hit() -> int:
    """Use ten prefixes twice, prefill many others once under memory pressure, and count remaining hits."""
    replay = replay_of(SLABS)
    replay.chunk_tokens = 16
    stems = [prompt(seed, 20) for seed in range(10)]
    for ending in range(3):
        for stem in stems:
            serve(replay, np.asarray([*stem, ending], np.int32))
    for seed in range(100, 106):
        serve(replay, prompt(seed, 160))
    assert replay.cache.counts.states_evicted
    return sum(serve(replay, np.asarray([*stem, 77], np.int32)) > 0 for stem in stems)


def test_used_states_survive_guesses_under_memory_pressure() -> None:
    assert used_prefixes_that_hit() == 10


def test_guesses_that_count_as_used_states_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant."""

    def keep(
        cache: PrefixCache,
        lease: PrefixLease,
        node: PrefixNode,
        state: int | None,
        hidden_1D: torch.Tensor | None,
    ) -> None:
        cache.keep_copy(node, state, hidden_1D)

    monkeypatch.setattr(PrefixCache, "keep_chunk", keep)
    assert used_prefixes_that_hit() < 10


def proven_state(replay: CacheReplay, seed: int) -> PrefixNode:
    """Cache the state after a request, and no guess."""
    asked = prompt(seed, 40)
    live = replay.admit(asked, 3)
    assert live
    replay.end(live, np.asarray([*asked, 1, 2, 3], np.int32))
    return replay.cache.tree.walk(SOLE, asked)[0]


def test_a_guess_newer_than_the_eviction_order_is_evicted_first() -> None:
    replay = replay_of(400)
    proven = [proven_state(replay, seed) for seed in range(40)]
    size = len(list(replay.cache.tree.nodes()))
    assert replay.cache.make_room(lambda: len(list(replay.cache.tree.nodes())) < size)  # builds an order
    left = [node for node in proven if node.state is not None]
    asked = prompt(1000, 1300)
    live = replay.admit(asked, 3)
    assert live
    replay.read(live, asked)
    assert len(guesses_of(replay)) == 3
    assert replay.cache.make_room(lambda: not guesses_of(replay))
    assert [node for node in proven if node.state is not None] == left
