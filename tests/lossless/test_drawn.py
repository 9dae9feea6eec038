"""Families on frames and mixers of others: each drafter once, in chains and trees, on both kinds of slots."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpecEngine
from tests.lossless.cases import SHAPES, memory_for, preempt_each
from tests.models.drawn import DRAWN

PROMPTS = ([5, 9, 31, 5, 9, 31, 5, 9], [*range(3, 50)], [7, 7, 7], [20, 3, 12, 20, 3, 12, 20])
PARAMS = (
    SamplingParams(max_tokens=28, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=28, temperature=0.8, seed=3),
)
REQUESTS = [(prompt, params) for params in PARAMS for prompt in PROMPTS]
PLAIN: Mapping[str, Any] = {"dtype": "float64", "kernels": "cpu", "max_model_len": 128, "max_running": 4}
CELLS: tuple[Mapping[str, Any], ...] = (
    {"draft": "ngram", "shape": "chain", "slots": "snapshot"},
    {"draft": "suffix", "shape": "tree", "slots": "record", "prefix_cache": True},
    {"draft": "auto", "shape": "tree", "slots": "record", "preempted": True},
    {"draft": "eagle", "shape": "tree", "slots": "record", "graphs": True},
    {"draft": "eagle", "shape": "chain", "slots": "snapshot"},
    {"draft": "self-int4", "shape": "chain", "slots": "record", "prefix_cache": True},
)


def texts(engine: SpecEngine) -> list[list[int]]:
    prompts, params = zip(*REQUESTS, strict=True)
    return [done.token_ids for done in engine.generate(list(prompts), list(params))]


@pytest.mark.parametrize("family", DRAWN)
def test_texts_are_those_of_plain_decoding(family: str, family_folder: Callable[..., Path]) -> None:
    folder = family_folder(family)
    with SpecEngine(folder, draft="none", **PLAIN) as engine:
        plain = texts(engine)
        layout = engine.model.settings.layout
    assert len({tuple(text) for text in plain}) == len(plain), "texts that say one token show nothing"
    accepted = 0
    for cell in CELLS:
        fields = {**PLAIN, "adaptive": False, "chunk_tokens": 16, "prefix_cache": False, **cell}
        fields |= SHAPES[fields.pop("shape")]
        preempted = fields.pop("preempted", False)
        if preempted:
            fields["memory_bytes"] = memory_for(layout, sequences=3, blocks=12)
        with SpecEngine(folder, **fields) as engine:
            if preempted:
                preempt_each(engine)
            assert texts(engine) == plain, cell
            if cell.get("prefix_cache"):
                assert texts(engine) == plain, f"{cell}, with prefixes kept"
                assert engine.model.loop.scheduler.cache.counts.hit > 20
            stats = engine.stats()
            assert stats.accepted > 0 and (stats.preemptions > 0) == bool(preempted), cell
            accepted += stats.accepted
    assert accepted > 300


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", DRAWN)
def test_whole_numbers_say_the_same_with_drafts(
    family: str, quantize: str, family_folder: Callable[..., Path]
) -> None:
    own = {"quantize": quantize, "max_model_len": 128, "max_running": 4}
    with SpecEngine(family_folder(family), draft="none", **own) as engine:
        plain = texts(engine)
    with SpecEngine(family_folder(family), draft="eagle", adaptive=False, **SHAPES["tree"], **own) as engine:
        assert texts(engine) == plain and engine.stats().accepted > 0
