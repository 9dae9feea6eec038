"""The clock keeps sessions in order and places bounded; the policies keep within their memory."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import torch

from specdec.bench.prefix.blocks import SIZE, BlockCache
from specdec.bench.prefix.figures import EDGES, bin_name, bin_of, figures
from specdec.bench.prefix.policies import Ground, Nothing, PerBlock, Prefix, Uncached
from specdec.bench.prefix.simulate import Course, Policy, Speeds, simulate
from specdec.bench.prefix.traces import Turn, trace_of
from specdec.state_slots.layout import KVShape, Layout, StateShape
from specdec.state_slots.prefix.tree import Ids

LAYOUT = Layout((KVShape(2, 16),), (StateShape(4, 16, 16, 3, 96),), torch.bfloat16)
ONE_BY_ONE = Speeds(most_alive=1)


def turn(session: str, number: int, at_s: float, prompt: Ids, output: int = 10) -> Turn:
    return Turn(session, number, at_s, prompt, np.full(output, 7, np.int32))


def tokens(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 99, count, np.int32)


@dataclass
class Watched:
    """Note what is alive; have memory for so many."""

    most: int = 99
    alive: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    largest: int = 0

    def admit(self, turn: Turn) -> Uncached | None:
        if len(self.alive) == self.most or len(turn.prompt) > 1000:
            return None
        name = f"{turn.session}{turn.turn}"
        self.alive.append(name)
        self.said.append(f"begin {name}")
        self.largest = max(self.largest, len(self.alive))
        return Uncached()

    def read(self, admitted: Uncached, turn: Turn) -> None:
        self.said.append(f"read {turn.session}{turn.turn}")

    def end(self, admitted: Uncached, turn: Turn) -> None:
        name = f"{turn.session}{turn.turn}"
        self.alive.remove(name)
        self.said.append(f"end {name}")

    def held(self) -> tuple[int, int]:
        return 0, 0


def test_a_turn_waits_for_the_one_that_it_answers() -> None:
    turns = [turn("a", 0, 0.0, tokens(10)), turn("a", 1, 0.01, tokens(10)), turn("b", 0, 0.02, tokens(10))]
    policy = Watched()
    simulate(turns, policy, Speeds())
    said = policy.said
    assert said.index("begin b0") < said.index("end a0") < said.index("begin a1")
    assert len(said) == 9


@pytest.mark.parametrize(("places", "memory"), [(2, 99), (99, 2)])
def test_places_and_memory_bound_those_alive(places: int, memory: int) -> None:
    turns = [turn(str(n), 0, 0.0, tokens(10)) for n in range(7)]
    policy = Watched(memory)
    simulate(turns, policy, Speeds(most_alive=places))
    assert policy.largest == 2
    begun = [what for what in policy.said if what.startswith("begin")]
    assert begun == [f"begin {n}0" for n in range(7)]


def test_what_never_fits_is_refused_and_holds_nobody_up() -> None:
    turns = [turn("a", 0, 0.0, tokens(2000)), turn("a", 1, 1.0, tokens(10)), turn("b", 0, 0.0, tokens(10))]
    policy = Watched()
    course = simulate(turns, policy, Speeds())
    assert course.refused == 1
    assert {"end a1", "end b0"} <= set(policy.said)


def test_blocks_are_found_whole_and_from_the_beginning() -> None:
    cache = BlockCache(LAYOUT, 1 << 30)
    whole = tokens(5 * SIZE + 1)
    for prompt, hit in ((whole, 0), (whole, 5 * SIZE), (whole[:-1], 4 * SIZE), (whole[1:], 0)):
        run = cache.admit(prompt, 1)
        assert run and run.hit == hit
        cache.end(run, np.append(prompt, np.int32(1)))


def test_the_last_block_of_the_oldest_prefix_goes_first() -> None:
    token = LAYOUT.block_bytes // LAYOUT.block_tokens
    cache = BlockCache(LAYOUT, 5 * LAYOUT.state_bytes + (4 * SIZE + 2) * token)
    old, new = tokens(2 * SIZE + 1, 1), tokens(2 * SIZE + 1, 2)
    for prompt in (old, new, tokens(SIZE // 2, 3)):
        run = cache.admit(prompt, 1)
        assert run
        cache.end(run, np.append(prompt, np.int32(1)))
    assert cache.states == 3
    first, second = cache.admit(old, 0), cache.admit(new, 0)
    assert first and first.hit == SIZE
    assert second is None or second.hit == 2 * SIZE


def test_a_request_gives_up_what_it_has_found_rather_than_wait_for_itself() -> None:
    token = LAYOUT.block_bytes // LAYOUT.block_tokens
    cache = BlockCache(LAYOUT, 3 * LAYOUT.state_bytes + (4 * SIZE + 1) * token)
    prompt = tokens(4 * SIZE, 1)
    hits = []
    for _ in range(2):
        run = cache.admit(prompt, 1)
        assert run
        hits.append(run.hit)
        cache.end(run, np.append(prompt, np.int32(1)))
    assert hits[0] == 0 < hits[1] < 3 * SIZE


def test_blocks_stay_within_their_memory() -> None:
    draw = np.random.default_rng(0)
    cache = BlockCache(LAYOUT, 30 * LAYOUT.state_bytes)
    stems, runs = [tokens(200, seed) for seed in range(5)], []
    for number in range(200):
        prompt = np.append(stems[draw.integers(5)][: draw.integers(1, 200)], tokens(5, 100 + number))
        if run := cache.admit(prompt, 3):
            cache.read(run, prompt)
            runs.append((run, np.append(prompt, tokens(3, number))))
        if len(runs) > 2 or not run:
            cache.end(*runs.pop(0))
        assert 0 <= cache.used_bytes <= cache.num_bytes
    for own in runs:
        cache.end(*own)
    size = SIZE * (LAYOUT.block_bytes // LAYOUT.block_tokens) + LAYOUT.state_bytes
    assert cache.used_bytes == cache.states * size


def test_policies_agree_with_what_they_drive() -> None:
    """One after the other, the second asks what the first asked, and goes on."""
    first = tokens(100)
    second = np.concatenate([first, np.full(10, 7, np.int32), tokens(40, 1)])
    trace = trace_of("t", [turn("a", 0, 0.0, first), turn("a", 1, 50.0, second)])
    ground = Ground(LAYOUT, 400 * LAYOUT.slab_bytes, float, False)
    for policy, hit in (
        (Nothing(), 0),
        (PerBlock(ground), 96),
        (Prefix(ground, 0.0), 109),
        (Prefix(ground, None), 109),
    ):
        course = simulate(trace.turns, cast(Policy[Any], policy), ONE_BY_ONE)
        assert course.hits == [0, hit]
    assert course.held[-1][1] > 0


def test_figures_add_up() -> None:
    lengths = [1, 512, 513, 5000, 40000]
    turns = [turn("a", n, 0.0, tokens(length)) for n, length in enumerate(lengths)]
    found = figures(turns, Course([0, 256, 0, 1000, 20000], held=[(10, 20), (30, 40)]), lambda n: n * n)
    assert found["tokens_hit"] == 21256 and found["hit_rate"] == 21256 / sum(lengths)
    assert found["flops_saved"] == 256**2 + 1000**2 + 20000**2
    assert (found["kv_bytes"], found["state_bytes"]) == (20, 30)
    assert [own["tokens_each"] for own in found["bins"]] == ["1-512", "513-1024", "4097-8192", "16385+"]
    assert [own["requests"] for own in found["bins"]] == [2, 1, 1, 1]
    for name in ("requests", "tokens", "tokens_hit", "flops_saved"):
        assert sum(own[name] for own in found["bins"]) == found[name]
    assert [bin_name(bin_of(edge)) for edge in EDGES[:2]] == ["1-512", "513-1024"]
