"""Memory follows the load from many short requests to few long ones and back, and drafts go on meanwhile."""

import random
from pathlib import Path

import pytest

from specdec import SamplingParams, SpecEngine
from tests.test_prefixes import DRAFTS, VOCAB, folder

__all__ = ["folder"]
LOADS = ((120, 12, 20), (6, 400, 60), (120, 12, 20))
"""Requests, tokens of their prompts and of their outputs."""


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("draft", ["mtp", "suffix"])
def test_both_ends_of_a_swing_fill_the_arena(folder: Path, draft: str, prefix_cache: bool) -> None:
    draw = random.Random(0)
    fields = {"dtype": "float64", "max_model_len": 512, "memory_bytes": 1_200_000, **DRAFTS[draft]}
    with SpecEngine(folder, prefix_cache=prefix_cache, **fields) as engine:
        loop, used = engine.model.loop, list[float]()
        right = loop.step

        def step() -> None:
            right()
            usage = loop.arena.usage()
            used.append(1 - usage.free_slabs / usage.slabs)

        loop.step = step  # type: ignore[method-assign]
        for count, length, tokens in LOADS:
            used.clear()
            drafted = loop.counts.drafted
            prompts = [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(count)]
            params = SamplingParams(max_tokens=tokens, temperature=0.5, seed=1, ignore_eos=True)
            done = engine.generate(prompts, params)
            assert all(own.finish_reason == "length" for own in done)
            full = sum(share > 0.9 for share in used)
            assert full > len(used) / 3, f"{full} of {len(used)} steps filled the arena"
            assert loop.counts.drafted - drafted > 100
        assert engine.stats().failed_steps == 0
