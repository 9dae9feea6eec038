"""LFM2 and LFM3 against transformers' own speculation: with prompt look-up both give the same text.

A convolution's window is the only recurrent state that transformers can roll back, so its speculation serves
as an oracle here.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec import SamplingParams, SpecEngine
from tests.lossless.cases import SHAPES

STEM = [5, 9, 31, 5, 9, 31, 44, 12]
PROMPTS = ([*STEM, *STEM, 5, 9], [*range(3, 30), *range(3, 20)], [7, 7, 7, 7], [20, 3, 12, 20, 3, 12, 20])
LENGTH = 40


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe", "lfm3"])
def test_texts_are_those_of_prompt_lookup(family: str, family_folder: Callable[..., Path]) -> None:
    folder = family_folder(family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    passes = [0]
    model.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            prompt_lookup_num_tokens=4,
            eos_token_id=None,
        )
        expected.append(said[0, len(prompt) :].tolist())
    assert passes[0] < len(PROMPTS) * LENGTH, "some of its own drafts were right"
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    for shape, slots in (("chain", "record"), ("tree", "snapshot")):
        own = {"dtype": "float32", "max_model_len": 128, "slots": slots, "adaptive": False, **SHAPES[shape]}
        with SpecEngine(folder, draft="ngram", **own) as engine:
            found = [list(done.token_ids) for done in engine.generate(list(PROMPTS), params)]
            assert found == expected and engine.stats().accepted > 20
